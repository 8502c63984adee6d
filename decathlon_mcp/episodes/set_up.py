"""Set-up of a task in an open sandbox, in Toolathlon's order (`utils/roles/task_agent.py`).

Copy the initial workspace, run preprocess, make the folders that some servers need, read the suite's tokens,
remove what only grading needs (sealing), start the task's servers and list their tools.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

import anyio.to_thread

from decathlon_mcp.archives.reading import top_level_names
from decathlon_mcp.driver_client.driver import DriverClient, ServerInfo
from decathlon_mcp.episodes.limits import EpisodeLimits
from decathlon_mcp.errors import DriverError, SetUpError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

OUTPUT_TAIL = 4000
"""Characters of a failed command's output that an error message quotes."""
SEALED_LIMIT_BYTES = 1 << 32
"""Largest task folder that is kept for grading."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """The result of a set-up.

    `servers`: what each of the task's servers reported when it started. `sealed`: tar of the task's folder as
    preprocess left it, None for a task without preprocess.
    """

    servers: Mapping[str, ServerInfo]
    sealed: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """The set-up of one task.

    `common`: archive of the files that every sandbox of the suite needs. `scratch`: a folder of the server
    for temporary archives. `credentials`: archives that are unpacked over the suite's files, each with its
    target folder.
    """

    suite: Suite
    task: Task
    launch_time: datetime
    common: Path
    scratch: Path
    limits: EpisodeLimits
    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()

    async def run(self, sandbox: Sandbox, driver: DriverClient) -> PreparedTask:
        """Run all steps. Raises SetUpError with the output of the step that failed."""
        # The order matters. Preprocess may write into the task's groundtruth and its token file, a token
        # file may read the groundtruth, and no process that the agent can influence may start before the
        # answers are gone.
        with anyio.move_on_after(self.limits.set_up_seconds):
            await self._unpack(sandbox, driver)
            sealed = None
            if self.task.has_preprocess:
                await self._preprocess(sandbox, driver)
            values = await self._read_values(sandbox, driver)
            if self.task.has_preprocess:
                sealed = self.scratch / "sealed.tar"
                await sandbox.get(sandbox.root / self.task.folder, sealed, SEALED_LIMIT_BYTES)
            made = await anyio.to_thread.run_sync(top_level_names, sealed) if sealed else frozenset[str]()
            await self._seal(sandbox, driver, values, made)
            return PreparedTask(await self._start_servers(sandbox, driver, values), sealed)
        raise SetUpError(f"the set-up of {self.task.id} took longer than {self.limits.set_up_seconds:g} s")

    @property
    def _needs_answers(self) -> bool:
        # A preprocess may read or write the answers, and a token file may read them.
        return self.task.has_preprocess or (
            self.task.has_token_file and bool(self.suite.token_names(self.task))
        )

    async def _unpack(self, sandbox: Sandbox, driver: DriverClient) -> None:
        profile, archive = self.suite.profile, self.scratch / "task.tar"
        await anyio.to_thread.run_sync(self._pack, archive)
        if profile.purged:
            await driver.arrange(*({"remove": str(sandbox.root / path)} for path in profile.purged))
        await sandbox.put(sandbox.root, archive)
        archive.unlink()
        for folder, credentials in self.credentials:
            await sandbox.put(sandbox.root / folder, credentials)
        workspace = str(sandbox.root / profile.workspace)
        steps: list[JsonObject] = [{"make": workspace}]
        if self.task.files.initial_workspace:
            initial = sandbox.root / self.task.folder / self.task.files.initial_workspace
            steps.append({"copy": str(initial), "to": workspace})
        steps += [{"make": f"{workspace}/{folder}"} for folder in self.suite.server_folders(self.task)]
        await driver.arrange(*steps)

    def _pack(self, archive: Path) -> None:
        # One archive and not two: each `put` into a container takes about 40 ms.
        shutil.copyfile(self.common, archive)
        self.suite.task_archive(self.task, archive, sealed=self._needs_answers)

    async def _preprocess(self, sandbox: Sandbox, driver: DriverClient) -> None:
        profile, seconds = self.suite.profile, self.limits.preprocess_seconds
        module = ".".join((*self.task.folder.parts, str(self.task.files.preprocess)))
        result = await driver.run(
            [
                *profile.run_module,
                module,
                "--agent_workspace",
                str(sandbox.root / profile.workspace),
                "--launch_time",
                self.suite.launch_time(self.launch_time),
            ],
            cwd=str(sandbox.root),
            env=dict(profile.environment),
            timeout_seconds=seconds,
            leave=self.task.leaves_running,
        )
        if result.timed_out:
            raise SetUpError(f"preprocess took longer than {seconds:g} s")
        if result.exit_code != 0 and profile.preprocess_must_succeed:
            output = (result.stderr.strip() or result.stdout.strip())[-OUTPUT_TAIL:]
            status = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
            raise SetUpError(f"preprocess failed ({status}): {output}")

    async def _seal(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str], made: Collection[str]
    ) -> None:
        """Remove what no server of the task needs, then check that no answer is left.

        What no server needs includes the suite's credentials for other tasks' servers. `made`: names in the
        task's folder after preprocess, drafts and caches among them.
        """
        folder = sandbox.root / self.task.folder
        unneeded = self.suite.names_to_seal(self.task, root=sandbox.root, values=values, created=made)
        try:
            await driver.arrange(
                *({"remove": str(folder / name)} for name in unneeded),
                *(await anyio.to_thread.run_sync(self._credential_steps, sandbox.root, values)),
                {"absent": list(self.suite.sealed_names), "under": str(sandbox.root / "tasks"), "except": []},
            )
        except DriverError as error:
            raise SetUpError(f"the answers could not be sealed: {error.message}") from None

    def _credential_steps(self, root: PurePosixPath, values: Mapping[str, str]) -> list[JsonObject]:
        """The `arrange` steps that remove credentials no server of the task needs, and their bytecode."""
        steps: list[JsonObject] = []
        for secret, stand_in in self.suite.secrets_to_remove(self.task, root=root, values=values).items():
            path = root / secret
            steps += [{"remove": str(path)}, {"remove": str(path.parent / "__pycache__")}]
            if stand_in is not None and (file := self.suite.path / stand_in).is_file():
                steps.append({"write": str(path), "text": file.read_text("utf-8")})
        return steps

    async def _read_values(self, sandbox: Sandbox, driver: DriverClient) -> Mapping[str, str]:
        """The values of `${config.*}` and `${token.*}`, computed by the suite's own Python."""
        if not self.suite.token_names(self.task):
            return {}
        result = await driver.run(
            self.suite.values_command(self.task),
            cwd=str(sandbox.root),
            env=dict(self.suite.profile.environment),
            timeout_seconds=self.limits.servers_seconds,
            channel=True,
        )
        if result.exit_code != 0:
            raise SetUpError(f"the suite's tokens could not be read: {result.stderr.strip()[-OUTPUT_TAIL:]}")
        return self.suite.parse_values(result.channel or "")

    async def _start_servers(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str]
    ) -> dict[str, ServerInfo]:
        specs = self.suite.server_specs(self.task, root=sandbox.root, values=values)
        if not specs:
            return {}
        try:
            return await driver.start(specs, deadline_seconds=self.limits.servers_seconds)
        except DriverError as error:
            about = error.data.get("about", {})
            stderr = str(about.get("stderr", "")).strip()[-OUTPUT_TAIL:]
            raise SetUpError(
                f"{error.message}{f'; stderr: {stderr}' if stderr else ''}",
                server=about.get("server"),
            ) from None
