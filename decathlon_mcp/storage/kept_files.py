"""Files of an episode beside its trajectory: its verdict, and logs for people.

They are in the episode's folder, readable by their owner alone. A file has its name only once it is complete.
`delete_old_episodes` deletes the folders of episodes that ended long ago, if the operator set `--keep-days`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.storage.disk import DiskSpace, new_file, write_all
from decathlon_mcp.storage.store import ENDED, Store
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, public_id

VERDICT_FILE = "verdict.json"
"""The episode's own verdict; regradings are in further files."""
SERVER_LOGS_FILE = "server-logs.json"
"""The end of what each server of the task wrote to stderr, by its name."""
RESERVED_FILE = ".verdict.reserved"
"""Room for the verdict. Every episode has it until it is over."""
VERDICT_BYTES = 256 << 10
"""Room on the disk that is reserved for the verdict: several times the longest that there can be."""

MAX_PER_ROUND = 500
"""Episodes that one round deletes, so that it takes seconds at most."""
DAY_SECONDS = 86_400.0
UNFINISHED_SECONDS = 7 * DAY_SECONDS
"""Age at which a folder that nobody has closed counts as finished; no episode takes as long."""
_OLD = (
    "SELECT id FROM episodes WHERE ended_at IS NOT NULL AND has_files AND ended_at < ? AND NOT pinned"
    " ORDER BY ended_at LIMIT ?"
)
_FORGET_FILES = (
    "UPDATE episodes SET has_files = 0, operation = NULL, verdict = NULL, spec = '{}', progress = '{}'"
    " WHERE id = ? AND phase = ?"
)

log = logging.getLogger("decathlon.observe")


class KeptFiles:
    """The kept files in the folder of one episode. All methods block: run them in a worker thread."""

    def __init__(self, folder: Path, disk: DiskSpace | None = None) -> None:
        self.folder = folder
        self.disk = disk
        self._reserved = folder / RESERVED_FILE

    def reserve_verdict(self) -> None:
        """Reserve room for the verdict. Raises OSError, for a full disk too."""
        descriptor = os.open(self._reserved, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, VERDICT_BYTES)
        except OSError:
            self._reserved.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def reserve_again(self) -> None:
        """Continue the folder of a server that died: without what it has not finished, and with the room.

        A disk that fails is logged, here and below.
        """
        with _failures_logged(RESERVED_FILE):
            for unfinished in self.folder.glob("*.partial"):
                unfinished.unlink(missing_ok=True)
            if not (self.folder / VERDICT_FILE).exists():
                self.reserve_verdict()

    def release_verdict(self) -> None:
        """Give back the room."""
        with _failures_logged(RESERVED_FILE):
            self._reserved.unlink(missing_ok=True)

    def write_verdict(self, verdict: JsonObject) -> None:
        """Write or replace `verdict.json`; the first time into the room that is reserved for it."""
        data = indented(verdict)
        with _failures_logged(VERDICT_FILE):
            if len(data) <= VERDICT_BYTES and self._reserved.exists():
                # Overwrites blocks that the file has already, so that a full disk cannot refuse them.
                with self._reserved.open("r+b", buffering=0) as file:
                    write_all(file.fileno(), data)
                    file.truncate(len(data))
                os.replace(self._reserved, self.folder / VERDICT_FILE)  # noqa: PTH105  (documented as atomic)
            else:
                self._reserved.unlink(missing_ok=True)
                with self._new_file(VERDICT_FILE) as out:
                    out.write(data)

    def write_log(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write or replace a file that people look at, unless the disk is nearly full."""
        with _failures_logged(name), self._new_file(name) as out:
            out.writelines(chunks if self.disk is None else self.disk.guard(chunks))

    def _new_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file that gets its name at the end of the body; after an error there is none."""
        # One name, since an episode has one writer: what a killed server left is overwritten.
        return new_file(self.folder / name, self.folder / f".{name}.partial")


def indented(value: JsonObject) -> bytes:
    """The JSON of a file that people look at."""
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


@contextmanager
def _failures_logged(name: str) -> Generator[None]:
    try:
        yield
    except (OSError, AtCapacityError) as error:
        why = error.strerror if isinstance(error, OSError) else error.message
        log.warning("a file of an episode could not be kept", extra=fields(file=name, why=why))


async def delete_old_episodes(
    store: Store | None, folder: Path, keep_days: float, *, limit: int = MAX_PER_ROUND
) -> int:
    """Delete the files of episodes that ended more than `keep_days` ago; returns the number of episodes.

    The numbers and labels of an episode stay in its row, so that runs keep theirs. Pinned episodes keep all.
    `folder`: the one with a folder for each episode. Folders that the store does not know (of `stdio`) are as
    old as their newest file. At most `limit` are deleted, the oldest rows first. What cannot be deleted is
    logged and tried again by the next call. Links are removed, never followed.
    """
    before = time.time() - keep_days * DAY_SECONDS
    deleted = 0
    if store is not None:
        for (handle,) in store.query(_OLD, before, limit):
            # The folder first: after a crash in between, the row brings the next round here again.
            if await anyio.to_thread.run_sync(delete_folder, folder, handle):
                store.write((_FORGET_FILES, (handle, ENDED)))
                deleted += 1
    if deleted < limit:
        deleted += await anyio.to_thread.run_sync(_delete_unknown, folder, before, limit - deleted)
    if deleted:
        log.info("deleted the files of old episodes", extra=fields(episodes=deleted, keep_days=keep_days))
    return deleted


def delete_folder(folder: Path, handle: str) -> bool:
    """Delete the folder of one episode; whether it is gone. A disk that fails is logged. Blocks."""
    target = folder / handle
    if target.parent != folder or handle in ("", ".", ".."):
        return False  # not the name of a folder in this one
    try:
        if target.is_symlink():
            target.unlink()
        else:
            shutil.rmtree(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        why = fields(episode=public_id(handle), why=error.strerror)
        log.warning("the files of an episode could not be deleted", extra=why)
        return False
    return True


def _delete_unknown(folder: Path, before: float, limit: int) -> int:
    """Delete folders of that age that the store does not know; returns their number."""
    # Read here and not on the event loop: it may know a hundred thousand.
    with Store.open_read_only(folder.parent) as store:
        known = set[str]() if store is None else {row[0] for row in store.query("SELECT id FROM episodes")}
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return 0
    deleted = 0
    for name in names:
        if deleted < limit and name not in known and _ended_before(folder / name, before):
            deleted += delete_folder(folder, name)
    return deleted


def _ended_before(folder: Path, before: float) -> bool:
    """Whether the folder's files are all older than that; by UNFINISHED_SECONDS more if it is still open."""
    try:
        with os.scandir(folder) as entries:
            times = {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in entries}
        newest = max([folder.stat().st_mtime, *times.values()])
    except OSError:
        return False
    return newest < before - (UNFINISHED_SECONDS if RESERVED_FILE in times else 0)
