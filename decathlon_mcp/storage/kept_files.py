"""Files of an episode beside its trajectory: its verdict, and logs for people.

They are in the episode's folder, readable by their owner alone. A file has its name only once it is complete.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.storage.disk import DiskSpace, new_file, write_all
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

VERDICT_FILE = "verdict.json"
"""The episode's own verdict; regradings are in further files."""
SERVER_LOGS_FILE = "server-logs.json"
"""The end of what each server of the task wrote to stderr, by its name."""
RESERVED_FILE = ".verdict.reserved"
"""Room for the verdict. Every episode has it until it is over."""
VERDICT_BYTES = 256 << 10
"""Room on the disk that is reserved for the verdict: several times the longest that there can be."""


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
