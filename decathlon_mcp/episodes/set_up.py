"""From an open sandbox to a task that can be played, as Toolathlon does it (`utils/roles/task_agent.py`).

Copy the initial workspace, run preprocess, make the folders some servers want, read the tokens, take away
what only grading needs, start the task's servers, list their tools. The order matters: preprocess may write
into the task's groundtruth and token file, a token file may read the groundtruth, and nothing that an agent
can reach runs before the answers are gone.
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
from decathlon_mcp.errors import DriverError, SetUpError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

OUTPUT_TAIL = 4000
ARCHIVE_LIMIT_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Deadlines:
    """In seconds."""

    servers: float
    preprocess: float
    whole: float


@dataclass(frozen=True, slots=True)
class SetUp:
    """One task about to be made playable. `scratch` is a folder of the server's for archives."""

    suite: Suite
    task: Task
    launch_time: datetime
    common: Path
    scratch: Path
    deadlines: Deadlines
    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()
    """What is laid over the suite's own files: archives, each with the folder it belongs in."""

    async def run(self, sandbox: Sandbox, driver: DriverClient) -> tuple[dict[str, ServerInfo], Path | None]:
        """The servers' facts, and the sealed task folder where preprocess may have changed it.

        Raises SetUpError with the cause, in the words of whatever failed.
        """
        with anyio.move_on_after(self.deadlines.whole):
            await self._unpack(sandbox, driver)
            sealed = None
            if self.task.has_preprocess:
                await self._preprocess(sandbox, driver)
            values = await self._values(sandbox, driver)
            if self.task.has_preprocess:
                sealed = self.scratch / "sealed.tar"
                await sandbox.get(sandbox.root / self.task.folder, sealed, ARCHIVE_LIMIT_BYTES)
            made = await anyio.to_thread.run_sync(top_level_names, sealed) if sealed else frozenset[str]()
            await self._seal(sandbox, driver, values, made)
            return await self._servers(sandbox, driver, values), sealed
        raise SetUpError(f"the set-up of {self.task.id} took longer than {self.deadlines.whole:g} s")

    @property
    def _answers_needed(self) -> bool:
        """A preprocess may read the answers or write them, and so may a token file."""
        return self.task.has_preprocess or (
            self.task.has_token_file and bool(self.suite.wanted_values(self.task))
        )

    async def _unpack(self, sandbox: Sandbox, driver: DriverClient) -> None:
        profile, archive = self.suite.profile, self.scratch / "task.tar"
        await anyio.to_thread.run_sync(self._pack, archive)
        if profile.purged:
            await driver.arrange(*({"remove": str(sandbox.root / path)} for path in profile.purged))
        await sandbox.put(sandbox.root, archive)
        archive.unlink()
        for folder, papers in self.credentials:
            await sandbox.put(sandbox.root / folder, papers)
        workspace = str(sandbox.root / profile.workspace)
        steps: list[JsonObject] = [{"make": workspace}]
        if self.task.parts.initial_workspace:
            initial = sandbox.root / self.task.folder / self.task.parts.initial_workspace
            steps.append({"copy": str(initial), "to": workspace})
        steps += [{"make": f"{workspace}/{folder}"} for folder in self.suite.server_folders(self.task)]
        await driver.arrange(*steps)

    def _pack(self, into: Path) -> None:
        """What every sandbox needs and what the task does, as one: a container takes 40 ms for each `put`."""
        shutil.copyfile(self.common, into)
        self.suite.task_archive(self.task, into, sealed=self._answers_needed)

    async def _preprocess(self, sandbox: Sandbox, driver: DriverClient) -> None:
        profile = self.suite.profile
        module = ".".join((*self.task.folder.parts, str(self.task.parts.preprocess)))
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
            timeout_seconds=self.deadlines.preprocess,
            leave=self.task.leaves_running,
        )
        if result.timed_out:
            raise SetUpError(f"preprocess took longer than {self.deadlines.preprocess:g} s")
        if result.exit_code != 0 and profile.preprocess_must_succeed:
            said = (result.stderr.strip() or result.stdout.strip())[-OUTPUT_TAIL:]
            how = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
            raise SetUpError(f"preprocess failed ({how}): {said}")

    async def _seal(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str], made: Collection[str]
    ) -> None:
        """Take away what no server needs, then search for the answers: what is not shown to be gone fails.

        What no server needs are also the suite's credentials for other tasks' servers.
        `made` are the names that preprocess left in the task's folder: drafts and caches among them.
        """
        folder = sandbox.root / self.task.folder
        going = self.suite.sealed(self.task, root=sandbox.root, values=values, made=made)
        try:
            await driver.arrange(
                *({"remove": str(folder / name)} for name in going),
                *(await anyio.to_thread.run_sync(self._withholding, sandbox.root, values)),
                {"absent": list(self.suite.sealed_names), "under": str(sandbox.root / "tasks"), "except": []},
            )
        except DriverError as error:
            raise SetUpError(f"the answers could not be sealed: {error.message}") from None

    def _withholding(self, root: PurePosixPath, values: Mapping[str, str]) -> list[JsonObject]:
        """How the credentials go that no server of the task needs, and what Python compiled of them."""
        steps: list[JsonObject] = []
        for secret, stand_in in self.suite.withheld(self.task, root=root, values=values).items():
            path = root / secret
            steps += [{"remove": str(path)}, {"remove": str(path.parent / "__pycache__")}]
            if stand_in is not None and (file := self.suite.path / stand_in).is_file():
                steps.append({"write": str(path), "text": file.read_text("utf-8")})
        return steps

    async def _values(self, sandbox: Sandbox, driver: DriverClient) -> Mapping[str, str]:
        """What `${config.*}` and `${token.*}` stand for, computed by the suite's own Python, once."""
        wanted = self.suite.wanted_values(self.task)
        if not wanted:
            return {}
        result = await driver.run(
            self.suite.values_command(self.task),
            cwd=str(sandbox.root),
            env=dict(self.suite.profile.environment),
            timeout_seconds=self.deadlines.servers,
            channel=True,
        )
        if result.exit_code != 0:
            raise SetUpError(f"the suite's tokens could not be read: {result.stderr.strip()[-OUTPUT_TAIL:]}")
        return self.suite.parse_values(result.channel or "")

    async def _servers(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str]
    ) -> dict[str, ServerInfo]:
        specs = self.suite.server_specs(self.task, root=sandbox.root, values=values)
        if not specs:
            return {}
        try:
            return await driver.start(specs, deadline_seconds=self.deadlines.servers)
        except DriverError as error:
            about = error.data.get("about", {})
            stderr = str(about.get("stderr", "")).strip()[-OUTPUT_TAIL:]
            raise SetUpError(
                f"{error.message}{f'; its last words: {stderr}' if stderr else ''}",
                server=about.get("server"),
            ) from None
