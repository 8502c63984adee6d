"""Set-up of a task: opens the agent's sandbox and prepares it in Toolathlon's order.

As in `utils/roles/task_agent.py`: copy the initial workspace, run preprocess, make the folders that some
servers need, read the suite's tokens, remove what only grading needs (sealing), and start the task's servers
that have to run from the beginning.

Preprocess normally has a sandbox of its own, of which the agent's gets the workspace and part of the task's
folder. Where that sandbox has to become the agent's, since processes run in it that belong to the task, what
preprocess changed elsewhere is removed or refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import anyio
import anyio.to_thread

from decathlon_mcp.archives.reading import top_level_names
from decathlon_mcp.archives.unpacking import append_archive, joined
from decathlon_mcp.driver.archives import get_archive, put_archive
from decathlon_mcp.driver.client import DriverClient, ServerInfo
from decathlon_mcp.episodes.specification import EpisodeLimits
from decathlon_mcp.errors import BadRequestError, DriverError, LimitExceededError, SetUpError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

OUTPUT_TAIL = 4000
"""Characters of a failed command's output that an error message quotes."""
SEALED_LIMIT_BYTES = 1 << 32
"""Largest task folder that is kept for grading."""
SEALED_FILE = "sealed.tar"
"""Archive of the task's folder after preprocess, in the episode's scratch folder."""
LINGER_SECONDS = 0.5
"""Processes that preprocess leaves running may end by themselves; after this time they belong to the task."""
MAX_LISTED = 10
"""Paths that an error message names."""


ServersToStart: TypeAlias = Callable[[Sandbox], Awaitable[Collection[str]]]
"""Chooses the servers that start at set-up, once the agent's sandbox is open."""
OpenSandbox: TypeAlias = Callable[[str | None], AbstractAsyncContextManager[tuple[Sandbox, DriverClient]]]
"""Opens a sandbox of an image, by default the suite's, and connects to its driver."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """The result of a set-up: the agent's sandbox.

    `servers`: what each server reported that the set-up has started. `task_folder_archive`: tar of the task's
    folder as preprocess left it, None for a task without preprocess. `preprocess_failure`: how preprocess
    failed, where the suite ignores that; empty if it did not.
    """

    sandbox: Sandbox
    driver: DriverClient
    servers: Mapping[str, ServerInfo]
    task_folder_archive: Path | None
    preprocess_failure: str = ""


@dataclass(frozen=True, slots=True)
class _Preprocessed:
    """What the first sandbox of a set-up has produced.

    `values`: of the suite's tokens. `task_folder_archive`, `failure`: see `PreparedTask`. `carried`: archive
    of the suite's files for the agent's sandbox, None if the first sandbox is the agent's.
    """

    values: Mapping[str, str]
    task_folder_archive: Path | None = None
    carried: Path | None = None
    failure: str = ""


class _TimeLimit:
    """A limit for all parts of a set-up together; opening and removing sandboxes is not counted."""

    def __init__(self, task_id: str, seconds: float) -> None:
        self._message = f"the set-up of {task_id} took longer than {seconds:g} s"
        self._remaining_seconds = seconds

    @contextmanager
    def part(self) -> Generator[None]:
        """Raises SetUpError when no time remains."""
        started_at = anyio.current_time()
        with anyio.move_on_after(self._remaining_seconds) as scope:
            yield
        self._remaining_seconds -= anyio.current_time() - started_at
        if scope.cancelled_caught:
            raise SetUpError(self._message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """The set-up of one task."""

    suite: Suite
    task: Task
    launch_time: datetime
    """The current time as the task sees it."""
    common: Path
    """Archive of the files that every sandbox of the suite needs."""
    scratch: Path
    """A folder of the server for temporary archives."""
    limits: EpisodeLimits
    before_reading: Callable[[], object]
    """Called in a thread before the suite's files are read."""
    credentials: Sequence[tuple[PurePosixPath, bytes]] = ()
    """Archives that are unpacked over the suite's files, each with its target folder."""
    isolated: bool = True
    """Whether a sandbox has file systems of its own."""

    async def run(
        self,
        stack: AsyncExitStack,
        open_first: OpenSandbox,
        open_second: OpenSandbox,
        servers_to_start: ServersToStart,
    ) -> PreparedTask:
        """Open the agent's sandbox on `stack` and set it up.

        A preprocess script may leave answers anywhere, so it normally runs in a first sandbox, which is
        removed before `open_second` opens the agent's. Both must have the same root. Raises SetUpError with
        the output of the step that failed.
        """
        limit = _TimeLimit(self.task.id, self.limits.set_up_seconds)
        async with AsyncExitStack() as first:
            sandbox, driver = await first.enter_async_context(open_first(None))
            image = sandbox.image_digest
            with limit.part():
                preprocessed = await self._prepare(sandbox, driver)
            if preprocessed.carried is None:
                await stack.enter_async_context(first.pop_all())
        if preprocessed.carried is not None:
            sandbox, driver = await stack.enter_async_context(open_second(image))
            with limit.part():
                await self._fill(sandbox, driver, preprocessed.carried)
                await self._seal(sandbox, driver, preprocessed.values)
        with limit.part():
            names = await servers_to_start(sandbox)
            servers = await self._start_servers(sandbox, driver, preprocessed.values, names)
        return PreparedTask(sandbox, driver, servers, preprocessed.task_folder_archive, preprocessed.failure)

    async def _prepare(self, sandbox: Sandbox, driver: DriverClient) -> _Preprocessed:
        """Set up the first sandbox, run preprocess in it, and decide whether the agent gets it."""
        # The order matters. Preprocess may write into the task's groundtruth and its token file, a token
        # file may read the groundtruth, and no process that the agent can influence may start before the
        # answers are gone.
        archive = self.scratch / "task.tar"
        await anyio.to_thread.run_sync(self._pack, archive)
        await self._fill(sandbox, driver, archive, self._initial_workspace_steps(sandbox))
        if not self.task.has_preprocess:
            values = await self._read_values(sandbox, driver)
            await self._seal(sandbox, driver, values)
            return _Preprocessed(values)
        may_stay = self._keeps_processes or not self.has_two_sandboxes
        before = await driver.snapshot() if may_stay else None
        left_running, failure = await self._preprocess(sandbox, driver)
        values = await self._read_values(sandbox, driver)
        stays = left_running > 0 or not self.has_two_sandboxes
        if stays:
            assert before is not None, "processes are left running only if they may be"
            # Before `get`: Docker's engine sets the owner of /etc/hostname again for every archive.
            await self._clean(sandbox, driver, before)
        task_folder_archive = self.scratch / SEALED_FILE
        await get_archive(
            sandbox, driver, sandbox.root / self.task.folder, task_folder_archive, SEALED_LIMIT_BYTES
        )
        if not stays:
            carried = await self._carry(sandbox, driver, values, task_folder_archive)
            return _Preprocessed(values, task_folder_archive, carried, failure)
        created = await anyio.to_thread.run_sync(top_level_names, task_folder_archive)
        await self._seal(sandbox, driver, values, created)
        return _Preprocessed(values, task_folder_archive, failure=failure)

    @property
    def has_two_sandboxes(self) -> bool:
        """Whether preprocess gets a sandbox of its own, unless it leaves processes running."""
        # Where an evaluator inspects the agent's sandbox, it may look for what preprocess did to it.
        way = self.task.preprocess_sandbox
        return self.task.has_preprocess and (way == "own" or (way == "auto" and not self.task.in_place))

    @property
    def _needs_answers(self) -> bool:
        # A preprocess may read or write the answers, and a token file may read them.
        return self.task.has_preprocess or (
            self.task.has_token_file and bool(self.suite.token_names(self.task))
        )

    @property
    def _keeps_processes(self) -> bool:
        return self.task.leaves_running and self.task.preprocess_sandbox != "own"

    async def _fill(
        self, sandbox: Sandbox, driver: DriverClient, archive: Path, steps: Sequence[JsonObject] = ()
    ) -> None:
        """Unpack the suite's files and the credentials, and make the workspace and the servers' folders.

        `steps`: of `arrange`, after the workspace has been made.
        """
        profile, root = self.suite.profile, sandbox.root
        workspace = str(root / profile.workspace)
        folders = [f"{workspace}/{folder}" for folder in self.suite.server_folders(self.task)]
        inside = [part for part in self.credentials if not part[0].is_absolute()]
        await put_archive(
            sandbox,
            driver,
            root,
            joined([(PurePosixPath(), archive), *inside]),
            before=[{"remove": str(root / path)} for path in profile.purged],
            after=[{"make": workspace}, *steps, *({"make": folder} for folder in folders)],
        )
        await anyio.Path(archive).unlink()
        for folder, credentials in self.credentials:
            if folder.is_absolute():
                await put_archive(sandbox, driver, folder, credentials)

    def _initial_workspace_steps(self, sandbox: Sandbox) -> list[JsonObject]:
        if not self.task.files.initial_workspace:
            return []
        initial = sandbox.root / self.task.folder / self.task.files.initial_workspace
        return [{"copy": str(initial), "to": str(sandbox.root / self.suite.profile.workspace)}]

    def _pack(self, archive: Path) -> None:
        # While the sandbox boots: in a checkout of git it runs git.
        self.before_reading()
        # One archive and not two: each `put` into a container takes about 40 ms.
        shutil.copyfile(self.common, archive)
        self.suite.task_archive(self.task, archive, sealed=self._needs_answers)

    async def _carry(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str], task_folder_archive: Path
    ) -> Path:
        """Pack the suite's files with the workspace and the task's folder as the agent may see them."""
        workspace, archive = self.scratch / "workspace.tar", self.scratch / "agent.tar"
        folder = sandbox.root / self.suite.profile.workspace

        def pack() -> None:
            shutil.copyfile(self.common, archive)
            names = top_level_names(task_folder_archive)
            names -= {*self.suite.names_to_seal(self.task, root=sandbox.root, values=values, created=names)}
            append_archive(archive, workspace, self.suite.profile.workspace)
            append_archive(archive, task_folder_archive, self.task.folder, names)
            workspace.unlink()

        try:
            await get_archive(sandbox, driver, folder, workspace, self.limits.workspace_bytes)
            await anyio.to_thread.run_sync(pack)
        except (BadRequestError, LimitExceededError) as error:
            raise SetUpError(
                f"what preprocess left cannot be copied to the agent's sandbox: {error.message}"
            ) from None
        return archive

    async def _preprocess(self, sandbox: Sandbox, driver: DriverClient) -> tuple[int, str]:
        """Run preprocess; returns the number of processes that it leaves running, and how it failed.

        Raises SetUpError if it failed and the suite does not ignore that.
        """
        profile, seconds = self.suite.profile, self.limits.preprocess_seconds
        module = ".".join((*self.task.folder.parts, str(self.task.files.preprocess)))
        result = await driver.run(
            [
                *profile.run_module,
                module,
                "--agent_workspace",
                str(sandbox.root / profile.workspace),
                "--launch_time",
                self.suite.preprocess_launch_time(self.launch_time),
            ],
            cwd=str(sandbox.root),
            env=dict(profile.environment),
            timeout_seconds=seconds,
            leave=self._keeps_processes,
            linger_seconds=LINGER_SECONDS if self.has_two_sandboxes else 0.0,
        )
        if result.timed_out:
            raise SetUpError(f"preprocess took longer than {seconds:g} s")
        if result.exit_code == 0:
            return result.background, ""
        output = (result.stderr.strip() or result.stdout.strip())[-OUTPUT_TAIL:]
        status = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
        failure = f"preprocess failed ({status}): {output}"
        if profile.preprocess_must_succeed:
            raise SetUpError(failure)
        return result.background, failure

    async def _seal(
        self,
        sandbox: Sandbox,
        driver: DriverClient,
        values: Mapping[str, str],
        created: Collection[str] = (),
    ) -> None:
        """Remove what no server of the task needs, then check that no answer is left.

        What no server needs includes the suite's credentials for other tasks' servers. `created`: names in
        the task's folder after preprocess, drafts and caches among them.
        """
        folder = sandbox.root / self.task.folder
        unneeded = self.suite.names_to_seal(self.task, root=sandbox.root, values=values, created=created)
        try:
            await driver.arrange(
                *({"remove": str(folder / name)} for name in unneeded),
                *(await anyio.to_thread.run_sync(self._credential_steps, sandbox.root, values)),
                {"absent": list(self.suite.profile.sealed), "under": str(sandbox.root / "tasks")},
            )
        except DriverError as error:
            raise SetUpError(f"the answers could not be sealed: {error.message}") from None

    async def _clean(self, sandbox: Sandbox, driver: DriverClient, before: JsonObject) -> None:
        """Remove or refuse what preprocess changed outside of the workspace and the task's folder."""
        profile = self.suite.profile
        # The sealing takes care of the task's folder and of the credentials, in which preprocess may renew
        # tokens.
        excepted = [profile.workspace, self.task.folder, *profile.secrets]
        try:
            remaining = await driver.clean(
                before,
                # Without isolation the other file systems are the machine's own.
                under=None if self.isolated else [str(sandbox.root)],
                excepted=[str(sandbox.root / path) for path in excepted],
            )
        except DriverError as error:
            raise SetUpError(f"what preprocess left could not be removed: {error.message}") from None
        if remaining.count:
            more = remaining.count - len(remaining.paths[:MAX_LISTED])
            listed = ", ".join(remaining.paths[:MAX_LISTED]) + (f" and {more} more" if more else "")
            raise SetUpError(
                f"preprocess left changes that the agent could read: {listed}. It may only change the "
                "workspace and its task's folder"
            )

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
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str], names: Collection[str]
    ) -> dict[str, ServerInfo]:
        """Define all of the task's servers, and start the servers with these names."""
        specs = self.suite.server_specs(self.task, root=sandbox.root, values=values)
        if not specs:
            return {}
        try:
            await driver.define(specs)
            if not names:
                return {}
            return await driver.start([*names], deadline_seconds=self.limits.servers_seconds)
        except DriverError as error:
            about = error.data.get("about", {})
            stderr = str(about.get("stderr", "")).strip()[-OUTPUT_TAIL:]
            raise SetUpError(
                f"{error.message}{f'; stderr: {stderr}' if stderr else ''}",
                server=about.get("server"),
            ) from None
