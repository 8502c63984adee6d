"""Lists of tools in the state folder: as episodes offered them, and a cache of what servers listed.

`tools/` has each list that an episode offered once, by its digest, which the trajectory's line `ready` names:
70 tools are some 180 KiB, too much for each episode. `tool-lists/` can be found again, so that losing any of
it is harmless. Several servers can use both at the same time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from weakref import WeakKeyDictionary

import anyio.to_thread

from decathlon_mcp.storage.disk import new_file, open_regular
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

FOLDER = "tools"
CACHE_FOLDER = "tool-lists"
UNFINISHED = ".new-"
MAX_CACHED = 2_000
"""More than three times the tasks of all of Toolathlon's suites."""
MAX_CACHE_BYTES = 256 << 20
"""Together. The tool lists of a task take 5 to 200 KB."""
MAX_LIST_BYTES = 16 << 20

log = logging.getLogger("decathlon.storage")


class CachedLists:
    """Texts by key, a name without separators. All methods block. A file that cannot be used is logged."""

    def __init__(self, state: Path) -> None:
        self._folder = state / CACHE_FOLDER

    def read(self, key: str) -> bytes | None:
        """The text under a key; None if there is none."""
        path = self._folder / key
        try:
            with open_regular(path) as file:
                os.utime(path)
                return file.read(MAX_LIST_BYTES)
        except OSError:
            return None

    def write(self, key: str, text: bytes) -> None:
        """Write or replace a text. Deletes the least recently used texts, if there are too many."""
        # Not synchronised: what a power cut leaves incomplete is no JSON.
        if len(text) <= MAX_LIST_BYTES and self.read(key) != text and _write(self._folder / key, text):
            self._delete_oldest()

    def delete(self, key: str, text: bytes) -> None:
        """Delete an entry if it has this text: another server may have replaced it."""
        if self.read(key) == text:
            (self._folder / key).unlink(missing_ok=True)

    def _delete_oldest(self) -> None:
        total_bytes, found = 0, list[tuple[float, int, str]]()
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # another server may have deleted it
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, status.st_size, entry.path))
        for number, (_, size_bytes, path) in enumerate(sorted(found, reverse=True), 1):
            total_bytes += size_bytes
            if number > MAX_CACHED or total_bytes > MAX_CACHE_BYTES:
                Path(path).unlink(missing_ok=True)


class KeptTools:
    """Writes the lists that episodes offer. `folder` is made when the first one is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: WeakKeyDictionary[object, str] = WeakKeyDictionary()

    async def keep(self, holder: object, tools: Sequence[JsonObject]) -> str:
        """Keep the tools, and return the SHA-256 of their JSON.

        `holder`: has the same tools as long as it lives. A disk that fails is logged.
        """
        digest = self._digests.get(holder)
        if digest is None or not _touch(self._folder / f"{digest}.json"):
            digest = self._digests[holder] = await anyio.to_thread.run_sync(self._write, tools)
        return digest

    def _write(self, tools: Sequence[JsonObject]) -> str:
        # ASCII, for lone surrogates too; sorted, so that the same tools are the same file.
        content = json.dumps(tools, sort_keys=True, separators=(",", ":")).encode("ascii")
        digest = sha256(content).hexdigest()
        if not _touch(file := self._folder / f"{digest}.json"):
            _write(file, content)
        return digest


def _touch(path: Path) -> bool:
    """Note that a list is used; False if it is not there any more."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def _write(path: Path, content: bytes) -> bool:
    """Write a file that has its name once it is complete. False if the disk fails, which is logged."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new_file(path, path.parent / f"{UNFINISHED}{token_hex(8)}") as file:
            file.write(content)
    except OSError as error:
        log.warning("a list of tools could not be kept", extra=fields(why=error.strerror))
        return False
    return True
