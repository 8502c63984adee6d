"""A cache of small files in the state folder: what can be found again, so that losing any of it is harmless.

Several servers can use a folder at the same time. A file has its name only once it is complete, and begins
with a digest of its content, so that a damaged one is recognised.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from decathlon_mcp.storage.disk import new_file, open_regular
from decathlon_mcp.telemetry.logs import fields

MAX_FILES = 2_000
"""More than three times the tasks of all of Toolathlon's suites."""
MAX_BYTES = 256 << 20
"""Together. The tool lists of a task take 5 to 200 KB."""
MAX_FILE_BYTES = 16 << 20
TOUCH_SECONDS = 3600.0
"""How exactly the time of a file's last use is known; the oldest are deleted first."""
UNFINISHED = ".new-"
UNFINISHED_SECONDS = 3600.0
"""Age from which an unfinished file is that of a server that died."""

log = logging.getLogger("decathlon.storage")


class FileCache:
    """Files by key, a name without separators. All methods block. A file that cannot be used is logged."""

    def __init__(self, folder: Path, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes

    def read(self, key: str) -> bytes | None:
        """The content of a file; None if there is none. A damaged file is deleted."""
        path = self.folder / key
        try:
            with open_regular(path) as file:
                data = file.read(MAX_FILE_BYTES + 1)  # of a longer one the digest is wrong
        except OSError:
            return None
        digest, _, content = data.partition(b"\n")
        if digest != _digest(content):
            log.warning("a damaged file of the cache was deleted", extra=fields(file=str(path)))
            self._delete(path)
            return None
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
                os.utime(path)
        return content

    def write(self, key: str, content: bytes) -> None:
        """Write or replace a file. Deletes those whose last use is longest ago, if there are too many."""
        data = b"%b\n%b" % (_digest(content), content)
        if len(data) > MAX_FILE_BYTES:
            return
        unfinished = self.folder / f"{UNFINISHED}{token_hex(8)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not synchronised: a file that a power cut leaves incomplete does not match its digest.
            with new_file(self.folder / key, unfinished) as file:
                file.write(data)
            self._limit(spared=key)
        except OSError as error:
            log.warning("a file of the cache could not be written", extra=fields(why=str(error)))

    def delete(self, key: str, content: bytes) -> bool:
        """Delete a file if it has this content: another server may have replaced it. Whether it had it."""
        if self.read(key) != content:
            return False
        self._delete(self.folder / key)
        return True

    def _limit(self, spared: str) -> None:
        """Delete the files that are too many, and unfinished ones that no server writes any more."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another server may have deleted it
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith(UNFINISHED):
                    found.append((status.st_mtime, status.st_size, Path(entry.path)))
                elif time.time() - status.st_mtime > UNFINISHED_SECONDS:
                    self._delete(Path(entry.path))
        count, size = len(found), sum(size for _, size, _ in found)
        for _, file_bytes, path in sorted(found):
            if count <= self._max_files and size <= self._max_bytes:
                return
            if path.name != spared:
                self._delete(path)
                count, size = count - 1, size - file_bytes

    def _delete(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()


def _digest(content: bytes) -> bytes:
    return sha256(content).hexdigest().encode()
