"""Tasks that are set up once: the first episode saves its sandbox, and the others begin as copies of it.

It is saved when the task is set up, its answers are sealed and its servers run, before anything of an agent
can run in it. Episodes of the same task and launch time that come meanwhile wait for it, and so a group of
them is set up once. Graders get sandboxes of their own, as always.

The states are in the server's scratch folder and end with it. So its suites, its image and its limits are the
same for all of them.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import cast

import anyio
import anyio.to_thread

from decathlon_mcp.catalogue.catalogue import SuiteRevision
from decathlon_mcp.episodes.beginnings import AgentSandbox, Following, Start
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.errors import CallTimeoutError, LimitExceededError, SnapshotError
from decathlon_mcp.plugins.branches.saving import begin_as_copy, save_state, why_not_saved
from decathlon_mcp.plugins.branches.states import SavedState, SavedStates, nearest_state
from decathlon_mcp.plugins.regrade.kept_attempts import ORIGINAL_FILE
from decathlon_mcp.sandboxes.capabilities import SavedSandbox
from decathlon_mcp.telemetry.logs import fields

PREPARED_FOLDER = "prepared"
RETRY_SECONDS = 60.0
"""After a failure no state of the task is saved for so long, and nobody waits for one: what fails for one
episode mostly fails for all, and they would fail one after the other. Longer than most set-ups take."""
MAX_KEYS = 1_000
"""A server that runs for long has seen many launch times. Beyond this it forgets the oldest."""

_log = logging.getLogger("decathlon.episodes")


@dataclass(frozen=True, slots=True)
class _Key:
    """What episodes have in common that can have the same state. `credentials`: their digest."""

    suite: str
    task: str
    revision: str
    suite_changed: bool
    launch_time: str
    credentials: str


@dataclass(slots=True)
class _Entry:
    """`folder`: of the state, or where it was. `lock`: for making the state."""

    folder: Path | None = None
    retry_at: float = -math.inf
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class PreparedTasks:
    """The states of one server, in `folder`."""

    def __init__(self, folder: Path, states: SavedStates) -> None:
        self._folder = folder
        self._states = states
        self._entries: dict[_Key, _Entry] = {}

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        """Begin as a copy of a task that is set up; or let `following` set it up, for others too."""
        key = await self._key(start.episode, start.resources.credentials)
        if key is None:
            return await following()
        entry = await self._entry(key)
        async with entry.lock:
            found = await anyio.to_thread.run_sync(self._find, entry)
            if found is None and anyio.current_time() >= entry.retry_at:
                # It is this episode's turn: others wait until its state is saved.
                try:
                    agent = await following()
                    facts = start.episode.records.progress.facts
                    now = replace(key, revision=facts.suite_revision, suite_changed=facts.suite_changed)
                    # Preprocess may succeed the next time, and the suite's files may have changed meanwhile.
                    if not facts.preprocess_failure and key == now:
                        # It is still a part of the set-up.
                        async with start.admission.set_ups:
                            await self._save(entry, start, agent)
                except Exception:
                    entry.retry_at = anyio.current_time() + RETRY_SECONDS
                    raise
                if entry.folder is None:
                    entry.retry_at = anyio.current_time() + RETRY_SECONDS
                return agent
        copy = None if found is None else await begin_as_copy(start, found, prepared=True)
        return copy or await following()

    async def _save(self, entry: _Entry, start: Start, agent: AgentSandbox) -> None:
        """Start the task's servers that do not run yet, and save the sandbox.

        What cannot be saved is logged. Raises SandboxLostError.
        """
        episode, session = start.episode, agent.open_session
        task_folder_archive = start.task_folder_archive if agent.sealed else None
        async with anyio.create_task_group() as tasks:
            for name in (*episode.spec.task.needs.servers, *session.starts.optional):
                tasks.start_soon(session.starts.start_ahead, [name], episode.calls.known.idle)
        folder = self._folder / secrets.token_hex(8)
        try:
            at = await anyio.to_thread.run_sync(self._create, folder)
            sandbox = cast("SavedSandbox", agent.sandbox)
            async with self._states.room(sandbox.max_snapshot_bytes):
                state = await save_state(episode, at, 0, sandbox, session.driver, task_folder_archive)

            def keep() -> None:
                if task_folder_archive is not None:
                    # Only with `--keep` there is one.
                    with suppress(FileNotFoundError):
                        shutil.copyfile(episode.files.folder / ORIGINAL_FILE, folder / ORIGINAL_FILE)
                self._states.add(state, task_folder_archive)

            await anyio.to_thread.run_sync(keep)
        except (SnapshotError, LimitExceededError, CallTimeoutError, OSError) as error:
            _log.warning(
                "a task that is set up could not be saved: its episodes are set up one by one",
                extra=fields(task=episode.spec.task_name, why=str(error), seconds=RETRY_SECONDS),
            )
        else:
            entry.folder = folder
            _log.info(
                "a task that is set up was saved",
                extra=fields(task=episode.spec.task_name, bytes=state.size_bytes),
            )
        finally:
            if entry.folder != folder:
                # Also of an episode that ends meanwhile.
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(_remove, folder)

    async def _key(self, episode: Episode, credentials: Sequence[tuple[PurePosixPath, bytes]]) -> _Key | None:
        """None if no state is saved for such an episode. `credentials`: the set-up unpacks them."""
        factory, spec = episode.sandbox_factory, episode.spec
        if not spec.shares_launch_time or why_not_saved(factory, self._states, spec.task) is not None:
            return None

        def read() -> _Key:
            revision = SuiteRevision.read(factory.suite, spec.task, factory.common_digest)
            return _Key(
                factory.suite.name,
                spec.task.id,
                revision.revision,
                revision.changed,
                spec.launch_time.isoformat(),
                _digest(credentials),
            )

        return await anyio.to_thread.run_sync(read)

    async def _entry(self, key: _Key) -> _Entry:
        entry = self._entries[key] = self._entries.pop(key, None) or _Entry()
        for oldest in [*self._entries][:-MAX_KEYS]:
            if not self._entries[oldest].lock.locked():
                await anyio.to_thread.run_sync(_remove, self._entries.pop(oldest).folder)
        return entry

    def _create(self, folder: Path) -> Path:
        folder.mkdir(mode=0o700, parents=True)
        return self._states.prepare(folder, 0)

    def _find(self, entry: _Entry) -> SavedState | None:
        """The state of an entry, which is about to be used. Blocks."""
        if entry.folder is None:
            return None
        state = nearest_state(entry.folder, 0)
        if state is None:
            _remove(entry.folder)
            entry.folder = None
            return None
        self._states.use(state)
        return state


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _digest(credentials: Sequence[tuple[PurePosixPath, bytes]]) -> str:
    digest = sha256()
    for folder, archive in credentials:
        digest.update(f"{folder}\0{len(archive)}\0".encode())
        digest.update(archive)
    return digest.hexdigest()
