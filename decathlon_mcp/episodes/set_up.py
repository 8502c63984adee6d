"""Set-up of a task: opens the agent's sandbox and prepares it in Toolathlon's order.

As in `utils/roles/task_agent.py`: copy the initial workspace, run preprocess, make the folders that some
servers need, read the suite's tokens, remove what only grading needs (sealing), and start the task's servers
that have to run from the beginning.

Preprocess normally has a sandbox of its own, of which the agent's gets the workspace and part of the task's
folder. Where that sandbox has to become the agent's, since processes run in it that belong to the task, what
preprocess changed elsewhere is removed or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import anyio
import anyio.to_thread

from decathlon_mcp.archives.reading import top_level_names
from decathlon_mcp.archives.unpacking import joined, selected
from decathlon_mcp.archives.writing import archive_chunks, save
from decathlon_mcp.catalogue.catalogue import SuiteRevision
from decathlon_mcp.driver.client import DriverClient, ServerInfo
from decathlon_mcp.driver.transfers import get_archive, put_archive
from decathlon_mcp.episodes.beginnings import SEALED_FILE, AgentSandbox, Start
from decathlon_mcp.errors import BadRequestError, DriverError, LimitExceededError, SetUpError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.suites.checkout import inside
from decathlon_mcp.suites.documents import read_text
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

OUTPUT_TAIL = 4000
"""Characters of a failed command's output that an error message quotes."""
SEALED_LIMIT_BYTES = 1 << 32
"""Largest task folder that is kept for grading."""
LINGER_SECONDS = 0.5
"""Processes that preprocess leaves running may end by themselves; after this time they belong to the task."""
MAX_LISTED = 10
"""Paths that an error message names."""

log = logging.getLogger("decathlon.episodes")


async def set_up(start: Start) -> AgentSandbox:
    """Set the task up in a new sandbox, and offer its tools.

    Raises SetUpError with the output of the step that failed.
    """
    async with start.admission.set_ups:
        return await _SetUp(start).run()


@dataclass(frozen=True, slots=True)
class _Preprocessed:
    """What the first sandbox of a set-up has produced.

    `values`: of the suite's tokens. `task_folder_archive`: tar of the task's folder as preprocess left it,
    None without preprocess. `carried`: archive of the task's files for the agent's sandbox, None if the first
    sandbox is the agent's.
    """

    values: Mapping[str, str]
    task_folder_archive: Path | None = None
    carried: Path | None = None


class _SetUp:
    """The set-up of one episode's task."""

    def __init__(self, start: Start) -> None:
        episode = start.episode
        self._start = start
        self._episode = episode
        self._factory = episode.sandbox_factory
        self._suite = episode.sandbox_factory.suite
        self._task = episode.spec.task
        self._limits = episode.spec.limits
        self._credentials = start.resources.credentials
        self._remaining_seconds = episode.spec.limits.set_up_seconds

    async def run(self) -> AgentSandbox:
        """Open the agent's sandbox and set it up.

        A preprocess script may leave answers anywhere, so it normally runs in a first sandbox, which is
        removed before the agent's opens.
        """
        start, factory, agent = self._start, self._factory, self._start.agent_name
        name = f"{self._episode.public_id}-preprocess" if self._has_two_sandboxes else agent
        if factory.root(name) != factory.root(agent):
            # Files that preprocess writes may contain absolute paths, so both sandboxes need the same root.
            # They can have the same name, as the first is removed before the second opens.
            name = agent
        async with AsyncExitStack() as first:
            sandbox, driver = await first.enter_async_context(start.open_sandbox(name, None))
            image = sandbox.image_digest
            with self._part():
                preprocessed = await self._prepare(sandbox, driver)
            if preprocessed.carried is None:
                await start.stack.enter_async_context(first.pop_all())
        if preprocessed.carried is not None:
            sandbox, driver = await start.stack.enter_async_context(start.open_sandbox(agent, image))
            with self._part():
                await self._fill(sandbox, driver, preprocessed.carried)
                await self._seal(sandbox, driver, preprocessed.values)
        with self._part():
            names = await start.offer.servers_to_start(sandbox)
            servers = await self._start_servers(sandbox, driver, preprocessed.values, names)
        tools = await start.offer.complete(sandbox, driver, servers)
        session = await start.offer.tool_session(sandbox, driver, running=servers)
        return AgentSandbox(
            sandbox, driver, session, tools, sealed=preprocessed.task_folder_archive is not None
        )

    @contextmanager
    def _part(self) -> Generator[None]:
        """Limit all parts of a set-up together; opening and removing sandboxes is not counted.

        Raises SetUpError when no time remains.
        """
        started_at = anyio.current_time()
        with anyio.move_on_after(self._remaining_seconds) as scope:
            yield
        self._remaining_seconds -= anyio.current_time() - started_at
        if scope.cancelled_caught:
            seconds = self._limits.set_up_seconds
            raise SetUpError(f"the set-up of {self._task.id} took longer than {seconds:g} s")

    async def _prepare(self, sandbox: Sandbox, driver: DriverClient) -> _Preprocessed:
        """Set up the first sandbox, run preprocess in it, and decide whether the agent gets it."""
        # The order matters. Preprocess may write into the task's groundtruth and its token file, a token
        # file may read the groundtruth, and no process that the agent can influence may start before the
        # answers are gone.
        archive = self._start.scratch / "task.tar"
        await anyio.to_thread.run_sync(self._pack, archive)
        initial, steps = self._task.files.initial_workspace, list[JsonObject]()
        if initial:
            source = sandbox.root / self._task.folder / initial
            steps += [{"copy": str(source), "to": str(sandbox.root / self._suite.profile.workspace)}]
        await self._fill(sandbox, driver, archive, steps)
        if self._task.files.preprocess is None:
            values = await self._read_values(sandbox, driver)
            await self._seal(sandbox, driver, values)
            return _Preprocessed(values)
        may_stay = self._keeps_processes or not self._has_two_sandboxes
        before = await driver.snapshot() if may_stay else None
        left_running = await self._preprocess(sandbox, driver)
        values = await self._read_values(sandbox, driver)
        stays = left_running > 0 or not self._has_two_sandboxes
        if stays:
            assert before is not None, "processes are left running only if they may be"
            # Before `get`: Docker's engine sets the owner of /etc/hostname again for every archive.
            await self._clean(sandbox, driver, before)
        archive = self._start.scratch / SEALED_FILE
        await get_archive(sandbox, driver, sandbox.root / self._task.folder, archive, SEALED_LIMIT_BYTES)
        if not stays:
            carried = await self._carry(sandbox, driver, values, archive)
            return _Preprocessed(values, archive, carried)
        created = await anyio.to_thread.run_sync(top_level_names, archive)
        await self._seal(sandbox, driver, values, created)
        return _Preprocessed(values, archive)

    @property
    def _has_two_sandboxes(self) -> bool:
        """Whether preprocess gets a sandbox of its own, unless it leaves processes running."""
        # Where an evaluator inspects the agent's sandbox, it may look for what preprocess did to it.
        way, has_preprocess = self._task.preprocess_sandbox, self._task.files.preprocess is not None
        return has_preprocess and (way == "own" or (way == "auto" and not self._task.in_place))

    @property
    def _keeps_processes(self) -> bool:
        return self._task.leaves_running and self._task.preprocess_sandbox != "own"

    async def _fill(
        self, sandbox: Sandbox, driver: DriverClient, archive: Path, steps: Sequence[JsonObject] = ()
    ) -> None:
        """Unpack the suite's files and the credentials, and make the workspace and the servers' folders.

        `archive`: the task's own files; it is removed. `steps`: of `arrange`, after the workspace was made.
        """
        profile, root = self._suite.profile, sandbox.root
        workspace = str(root / profile.workspace)
        folders = [f"{workspace}/{folder}" for folder in self._suite.server_folders(self._task)]
        inside = [part for part in self._credentials if not part[0].is_absolute()]
        await put_archive(
            sandbox,
            driver,
            root,
            joined([(PurePosixPath(), self._factory.common), (PurePosixPath(), archive), *inside]),
            before=[{"remove": str(root / path)} for path in profile.purged],
            after=[{"make": workspace}, *steps, *({"make": folder} for folder in folders)],
        )
        await anyio.Path(archive).unlink()
        for folder, credentials in self._credentials:
            if folder.is_absolute():
                await put_archive(sandbox, driver, folder, credentials)

    def _pack(self, archive: Path) -> None:
        # While the sandbox boots: in a checkout of git it runs git.
        read = SuiteRevision.read(self._suite, self._task, self._factory.common_digest)
        self._episode.records.note_facts(
            suite_revision=read.revision, suite_release=read.release, suite_changed=read.changed
        )
        # A preprocess may read or write the answers, and a token file may read them.
        has_tokens = self._task.has_token_file and bool(self._suite.token_names(self._task))
        self._suite.task_archive(
            self._task, archive, sealed=has_tokens or self._task.files.preprocess is not None
        )

    async def _carry(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str], task_folder_archive: Path
    ) -> Path:
        """Pack the workspace and the task's folder as the agent may see them."""
        workspace, archive = self._start.scratch / "workspace.tar", self._start.scratch / "agent.tar"
        folder = sandbox.root / self._suite.profile.workspace

        def pack() -> None:
            names = top_level_names(task_folder_archive)
            names -= {*self._suite.names_to_seal(self._task, root=sandbox.root, values=values, created=names)}
            kept = (self._task.folder, selected(task_folder_archive, names))
            parts = joined([(self._suite.profile.workspace, workspace), kept])
            save(archive_chunks(parts.entries()), archive)
            workspace.unlink()

        try:
            await get_archive(sandbox, driver, folder, workspace, self._limits.workspace_bytes)
            await anyio.to_thread.run_sync(pack)
        except (BadRequestError, LimitExceededError) as error:
            raise SetUpError(
                f"what preprocess left cannot be copied to the agent's sandbox: {error.message}"
            ) from None
        return archive

    async def _preprocess(self, sandbox: Sandbox, driver: DriverClient) -> int:
        """Run preprocess; returns the number of processes that it leaves running.

        Raises SetUpError if it failed and the suite does not ignore that.
        """
        profile, seconds = self._suite.profile, self._limits.preprocess_seconds
        module = ".".join((*self._task.folder.parts, str(self._task.files.preprocess)))
        result = await driver.run(
            [
                *profile.run_module,
                module,
                "--agent_workspace",
                str(sandbox.root / profile.workspace),
                "--launch_time",
                self._suite.preprocess_launch_time(self._episode.spec.launch_time),
            ],
            cwd=str(sandbox.root),
            env=dict(profile.environment),
            timeout_seconds=seconds,
            leave=self._keeps_processes,
            linger_seconds=LINGER_SECONDS if self._has_two_sandboxes else 0.0,
        )
        if result.timed_out:
            raise SetUpError(f"preprocess took longer than {seconds:g} s")
        if result.exit_code == 0:
            return result.background
        output = (result.stderr.strip() or result.stdout.strip())[-OUTPUT_TAIL:]
        status = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
        failure = f"preprocess failed ({status}): {output}"
        if profile.preprocess_must_succeed:
            raise SetUpError(failure)
        episode = self._episode
        log.warning(
            "preprocess failed, which its suite ignores",
            extra=fields(episode=episode.public_id, task=episode.spec.task_name, why=failure),
        )
        episode.trajectory.add("preprocess_failed", failure=failure)
        episode.records.note_facts(preprocess_failure=failure)
        return result.background

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
        folder = sandbox.root / self._task.folder
        unneeded = self._suite.names_to_seal(self._task, root=sandbox.root, values=values, created=created)
        try:
            await driver.arrange(
                *({"remove": str(folder / name)} for name in unneeded),
                *(await anyio.to_thread.run_sync(self._credential_steps, sandbox.root, values)),
                {"absent": list(self._suite.profile.sealed), "under": str(sandbox.root / "tasks")},
            )
        except DriverError as error:
            raise SetUpError(f"the answers could not be sealed: {error.message}") from None

    async def _clean(self, sandbox: Sandbox, driver: DriverClient, before: JsonObject) -> None:
        """Remove or refuse what preprocess changed outside of the workspace and the task's folder."""
        profile = self._suite.profile
        # The sealing takes care of the task's folder and of the credentials, in which preprocess may renew
        # tokens.
        excepted = [profile.workspace, self._task.folder, *profile.secrets]
        try:
            remaining = await driver.clean(
                before,
                # Without isolation the other file systems are the machine's own.
                under=None if self._factory.provider.isolation != "none" else [str(sandbox.root)],
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
        for secret, stand_in in self._suite.secrets_to_remove(self._task, root=root, values=values).items():
            path = root / secret
            steps += [{"remove": str(path)}, {"remove": str(path.parent / "__pycache__")}]
            if stand_in is not None and (file := inside(self._suite.path, stand_in)).is_file():
                steps.append({"write": str(path), "text": read_text(file)})
        return steps

    async def _read_values(self, sandbox: Sandbox, driver: DriverClient) -> Mapping[str, str]:
        """The values of `${config.*}` and `${token.*}`, computed by the suite's own Python."""
        if not self._suite.token_names(self._task):
            return {}
        result = await driver.run(
            self._suite.values_command(self._task),
            cwd=str(sandbox.root),
            env=dict(self._suite.profile.environment),
            timeout_seconds=self._limits.servers_seconds,
            channel=True,
        )
        if result.exit_code != 0:
            raise SetUpError(f"the suite's tokens could not be read: {result.stderr.strip()[-OUTPUT_TAIL:]}")
        return self._suite.parse_values(result.channel or "")

    async def _start_servers(
        self, sandbox: Sandbox, driver: DriverClient, values: Mapping[str, str], names: Collection[str]
    ) -> dict[str, ServerInfo]:
        """Define all of the task's servers, and start the servers with these names."""
        specs = self._suite.server_specs(self._task, root=sandbox.root, values=values)
        if not specs:
            return {}
        try:
            await driver.define(specs)
            if not names:
                return {}
            return await driver.start([*names], deadline_seconds=self._limits.servers_seconds)
        except DriverError as error:
            about = error.data.get("about", {})
            stderr = str(about.get("stderr", "")).strip()[-OUTPUT_TAIL:]
            raise SetUpError(
                f"{error.message}{f'; stderr: {stderr}' if stderr else ''}",
                server=about.get("server"),
            ) from None
