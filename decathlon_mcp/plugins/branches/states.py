"""The saved states of episodes: snapshots of their sandboxes, with what others need to go on from them.

They are in the folders of their episodes, and deleted with these: `snapshots/<call>/` is a sandbox as it was
after that call, `snapshots/<call>.json` the rest. Without the second file, the first is unfinished. The
states of tasks that are set up (`prepared`) are kept in the same way, in folders of their own. States only
save time, so that the oldest are deleted where there are too many; one of a task counts as new when it is
copied. States of the token that has most go first: with N tokens that have states, each can keep an N-th of
the space whatever the others save.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

import anyio
from pydantic import TypeAdapter

from decathlon_mcp.errors import LimitExceededError
from decathlon_mcp.storage.disk import DiskSpace, new_file, open_regular
from decathlon_mcp.storage.kept_files import RESERVED_FILE
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json

SNAPSHOTS_FOLDER = "snapshots"
SEALED_FILE = "sealed.tar"
"""Archive of the task's folder after preprocess, the same for all states of an episode."""
_STATE_BYTES = 64 << 20
"""A state has the definitions of all tools."""
ROOM_SECONDS = 60.0
"""How long a sandbox waits for the room that others may need, which are being saved. Its calls wait too."""

_log = logging.getLogger("decathlon.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """One state of an episode."""

    folder: Path
    """The snapshot of its sandbox."""
    at: int
    """The call after which it was saved; 0: none."""
    provider: str
    wire_version: int
    generation: int
    """Of the server that the driver knows."""
    size_bytes: int
    sealed: bool
    """Whether there is a `SEALED_FILE`."""
    token: str | None = None
    """Whose share of the space it uses; None if there is nobody to share with."""
    progress: JsonObject = field(default_factory=dict[str, object])
    tools: JsonObject = field(default_factory=dict[str, object])

    @property
    def task_folder_archive(self) -> Path:
        return self.folder.with_name(SEALED_FILE)

    @property
    def owner(self) -> Path:
        """The folder of the episode, or of the task, that it is a state of."""
        return self.folder.parent.parent

    @classmethod
    def read(cls, folder: Path) -> SavedState | None:
        """The state with this snapshot; None if it is not there, or not complete."""
        try:
            with open_regular(_record(folder)) as file:
                return _STATE.validate_python({**json.loads(file.read(_STATE_BYTES)), "folder": folder})
        except (OSError, ValueError, TypeError):
            return None


_STATE = TypeAdapter(SavedState)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A state that takes space."""

    size_bytes: int
    token: str | None


class SavedStates:
    """The saved states of all episodes in a folder. All methods but `room` block.

    `max_bytes`: of all together; with 0 none is saved. `kept`: how many of each episode. `disk`: of the
    folder.
    """

    def __init__(self, episodes: Path, *, max_bytes: int, kept: int, disk: DiskSpace | None = None) -> None:
        self._episodes = episodes
        self._max_bytes = max_bytes
        self._kept = kept
        self._disk = disk
        self._promised_bytes = 0
        self._given_back = anyio.Event()
        self._lock = Lock()
        # All states by their folders, the oldest first; None until it is needed.
        self._states: dict[Path, _Kept] | None = None

    @property
    def are_saved(self) -> bool:
        return self._max_bytes > 0

    @asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncGenerator[None]:
        """In the body, a snapshot of at most so many bytes may be written.

        How large it is shows only when it is there, and what is in a sandbox is the agent's: without this, it
        could fill the disk, and end the attempts of others. Waits while others are written, for up to
        ROOM_SECONDS. Raises LimitExceededError if the disk has no room, and OSError.
        """
        with anyio.move_on_after(ROOM_SECONDS):
            while self._promised_bytes and not self._has_room(size_bytes):
                await self._given_back.wait()
        if not self._has_room(size_bytes):
            raise LimitExceededError(
                f"the state of this sandbox may take {size_bytes >> 20} MiB, for which the server's disk has "
                "no room above `--min-free-mib`; with a lower `--memory-mib` it takes less"
            )
        self._promised_bytes += size_bytes
        try:
            yield
        finally:
            self._promised_bytes -= size_bytes
            given_back, self._given_back = self._given_back, anyio.Event()
            given_back.set()

    def _has_room(self, size_bytes: int) -> bool:
        disk = self._disk
        return disk is None or self._promised_bytes + size_bytes <= disk.free_bytes() - disk.floor_bytes

    def prepare(self, episode: Path, at: int) -> Path:
        """A free path for the snapshot after a call, in the folder of an episode."""
        folder = episode / SNAPSHOTS_FOLDER / str(at)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        for unfinished in _snapshots(folder.parent):
            if not _record(unfinished).exists():
                shutil.rmtree(unfinished)
        return folder

    def add(self, state: SavedState, task_folder_archive: Path | None) -> None:
        """Keep a state whose snapshot is there; `task_folder_archive`: its `SEALED_FILE`. Deletes others.

        Raises LimitExceededError for a state that is too large, alone or beside what other tokens keep of
        their shares, and OSError; then it is not kept.
        """
        with self._lock:
            try:
                self._require_room(state)
                if task_folder_archive is not None and not state.task_folder_archive.exists():
                    _link(task_folder_archive, state.task_folder_archive)
                content = {**asdict(state), "folder": ""}
                with new_file(_record(state.folder), state.folder.with_suffix(".partial")) as file:
                    file.write(as_json(content))
            except BaseException:
                shutil.rmtree(state.folder, ignore_errors=True)
                raise
            known = self._known()
            known[state.folder] = _Kept(state.size_bytes, state.token)
            own = [folder for folder in known if folder.parent == state.folder.parent]
            for folder in own[: -self._kept]:
                self._delete(folder)
            while sum(kept.size_bytes for kept in known.values()) > self._max_bytes:
                self._delete(_first_to_go(known))
            if state.folder not in known:
                raise LimitExceededError(
                    f"the state of the sandbox has {state.size_bytes >> 20} MiB, and the states of other "
                    f"tokens leave less of the {self._max_bytes >> 20} MiB for all (`--snapshot-mib`)"
                )

    def use(self, state: SavedState) -> None:
        """Count it as new, because it is about to be copied: others are deleted before it."""
        with self._lock:
            known = self._known()
            if state.folder in known:
                known[state.folder] = known.pop(state.folder)

    def _require_room(self, state: SavedState) -> None:
        if state.size_bytes > self._max_bytes:
            raise LimitExceededError(
                f"the state of the sandbox has {state.size_bytes >> 20} MiB, and all states together have at "
                f"most {self._max_bytes >> 20} MiB (`--snapshot-mib`)"
            )

    def _known(self) -> dict[Path, _Kept]:
        if self._states is None:
            found: list[tuple[float, SavedState]] = []
            for folder in self._episodes.glob(f"*/{SNAPSHOTS_FOLDER}"):
                for snapshot in _snapshots(folder):
                    if (state := SavedState.read(snapshot)) is not None:
                        with suppress(OSError):
                            found.append((_record(snapshot).stat().st_mtime, state))
            found.sort(key=lambda item: item[0])
            self._states = {state.folder: _Kept(state.size_bytes, state.token) for _, state in found}
        # Others are deleted with their episodes.
        for folder in [folder for folder in self._states if not folder.exists()]:
            del self._states[folder]
        return self._states

    def _delete(self, folder: Path) -> None:
        assert self._states is not None
        del self._states[folder]
        try:
            _record(folder).unlink(missing_ok=True)
            shutil.rmtree(folder)
            if not any(_snapshots(folder.parent)):
                (folder.parent / SEALED_FILE).unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "a saved state could not be deleted", extra=fields(folder=str(folder), why=error.strerror)
            )


def _first_to_go(known: Mapping[Path, _Kept]) -> Path:
    """The oldest state of the token that has most.

    This token is over its share where all states are too many.
    """
    used: Counter[str | None] = Counter()
    for kept in known.values():
        used[kept.token] += kept.size_bytes
    ((most, _),) = used.most_common(1)
    return next(folder for folder, kept in known.items() if kept.token == most)


def remove_states_of_ended(episodes: Path, *, dry_run: bool) -> int:
    """Remove the states of episodes whose attempt is over; returns how many there were. Blocks."""
    count = 0
    for folder in episodes.glob(f"*/{SNAPSHOTS_FOLDER}"):
        if not (folder.parent / RESERVED_FILE).exists():
            count += sum(1 for _ in _snapshots(folder))
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
    return count


def discard(state: SavedState) -> None:
    """Remove a state that cannot be used. Blocks."""
    _record(state.folder).unlink(missing_ok=True)
    shutil.rmtree(state.folder, ignore_errors=True)


def nearest_state(episode: Path, at: int) -> SavedState | None:
    """The newest state, in the folder of an episode, that is not later than after this call. Blocks."""
    folders = {int(folder.name): folder for folder in _snapshots(episode / SNAPSHOTS_FOLDER)}
    for number in sorted((number for number in folders if number <= at), reverse=True):
        if (state := SavedState.read(folders[number])) is not None:
            return state
    return None


def _snapshots(folder: Path) -> Iterator[Path]:
    try:
        yield from [entry for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    except OSError:
        return


def _record(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as content, new_file(target, target.with_suffix(".partial")) as file:
            shutil.copyfileobj(content, file)
