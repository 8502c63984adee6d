"""Files of an episode beside its trajectory: its verdict and logs for people, and what a later grading needs.

They are in the episode's folder, readable by their owner alone. A file has its name only once it is complete.
Nothing here deletes them, except what could not be kept as a whole.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

import anyio.from_thread

from decathlon_mcp.errors import AtCapacityError, BadRequestError, LimitExceededError
from decathlon_mcp.storage.disk import DiskSpace, create_private, new_file, open_regular, write_all
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, read_object

CHUNK_BYTES = 1 << 20
COMPRESSION_LEVEL = 1
"""gzip's fastest: the grading waits for it, and it takes most of what there is to gain from text."""
MAX_VERDICTS = 10_000
"""Verdicts of one episode. A limit on the search for a free name."""
VERDICT_FILE = "verdict.json"
"""The episode's own verdict; regradings are in further files."""
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

        A disk that fails is logged.
        """
        try:
            for unfinished in self.folder.glob("*.partial"):
                unfinished.unlink(missing_ok=True)
            if not (self.folder / VERDICT_FILE).exists():
                self.reserve_verdict()
        except OSError as error:
            _warn_of_file(RESERVED_FILE, error)

    def release_verdict(self) -> None:
        """Give back the room. A disk that fails is logged."""
        try:
            self._reserved.unlink(missing_ok=True)
        except OSError as error:
            _warn_of_file(RESERVED_FILE, error)

    def write_verdict(self, verdict: JsonObject) -> None:
        """Write or replace `verdict.json`; the first time into the room that is reserved for it.

        A disk that fails is logged.
        """
        data = indented(verdict)
        try:
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
        except OSError as error:
            _warn_of_file(VERDICT_FILE, error)

    def write_log(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write or replace a file that people look at. A disk that fails, or is nearly full, is logged."""
        try:
            with self._new_file(name) as out:
                out.writelines(chunks if self.disk is None else self.disk.guard(chunks))
        except (OSError, AtCapacityError) as error:
            _warn_of_file(name, error)

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def keep_archive(self, source: Path, name: str, limit_bytes: int) -> None:
        """Write or replace a file: `source`, compressed with gzip, at most `limit_bytes` long.

        Raises LimitExceededError past the limit, AtCapacityError if the disk is nearly full, and OSError.
        """
        allowed_bytes = limit_bytes
        if self.disk is not None:
            self.disk.refuse_if_low()
            allowed_bytes = self.disk.limit_archive(limit_bytes)
        with (
            source.open("rb") as plain,
            self._new_file(name) as out,
            # No name and no time, so that the same archive gives the same bytes.
            gzip.GzipFile("", "wb", COMPRESSION_LEVEL, out, mtime=0) as packed,
        ):
            while chunk := plain.read(CHUNK_BYTES):
                packed.write(chunk)
                if out.tell() > allowed_bytes:
                    raise _over_limit(name, allowed_bytes, limit_bytes)
                anyio.from_thread.check_cancelled()

    def restore_archive(self, name: str, into: Path, limit_bytes: int) -> None:
        """Decompress a kept file to the new file `into`, of at most `limit_bytes`.

        Raises LimitExceededError past the limit, AtCapacityError if the disk is nearly full, BadRequestError
        if the file is broken, and OSError.
        """
        allowed_bytes = limit_bytes if self.disk is None else self.disk.limit_archive(limit_bytes)
        written_bytes = 0
        try:
            with (
                open_regular(self.folder / name) as kept,
                gzip.GzipFile(fileobj=kept) as packed,
                into.open("xb") as out,
            ):
                while chunk := packed.read(CHUNK_BYTES):
                    written_bytes += len(chunk)
                    if written_bytes > allowed_bytes:
                        raise _over_limit(name, allowed_bytes, limit_bytes)
                    out.write(chunk)
                    anyio.from_thread.check_cancelled()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadRequestError(f"the kept file {name} is broken: {error}") from None
        if not written_bytes:
            raise BadRequestError(f"the kept file {name} is broken: it is empty")

    def write(self, name: str, value: JsonObject) -> None:
        """Write or replace a JSON file. Raises AtCapacityError if the disk is nearly full, and OSError."""
        if self.disk is not None:
            self.disk.refuse_if_low()
        with self._new_file(name) as out:
            # ASCII: an answer may contain lone surrogates, which UTF-8 cannot encode.
            out.write(json.dumps(value).encode("ascii"))

    def read(self, name: str) -> JsonObject:
        """Read a JSON file. Raises BadRequestError if it is missing or no JSON object."""
        try:
            with open_regular(self.folder / name) as file:
                value = read_object(file.read())
        except OSError as error:
            raise BadRequestError(f"{name} cannot be read: {error.strerror}") from None
        if value is None:
            raise BadRequestError(f"{name} is not a JSON object")
        return value

    def remove(self, *names: str) -> None:
        """Delete files; those that do not exist are ignored. Raises OSError."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def add_verdict(self, verdict: JsonObject) -> str:
        """Write a verdict to the next free of `verdict-2.json`, `verdict-3.json`, ... and return that name.

        Raises OSError.
        """
        draft = self.folder / f".verdict-draft.{token_hex(6)}"
        try:
            with create_private(draft) as out:
                out.write((json.dumps(verdict, indent=2) + "\n").encode("ascii"))
            for number in range(2, MAX_VERDICTS):
                try:
                    # link(2) never replaces a file, so that two regradings at once keep both verdicts.
                    (self.folder / f"verdict-{number}.json").hardlink_to(draft)
                except FileExistsError:
                    continue
                return f"verdict-{number}.json"
        finally:
            draft.unlink(missing_ok=True)
        raise OSError(f"{self.folder} has {MAX_VERDICTS} verdicts")

    def _new_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file that gets its name at the end of the body; after an error there is none."""
        # One name, since an episode has one writer: what a killed server left is overwritten.
        return new_file(self.folder / name, self.folder / f".{name}.partial")


def indented(value: JsonObject) -> bytes:
    """The JSON of a file that people look at."""
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def _warn_of_file(name: str, error: OSError | AtCapacityError) -> None:
    why = error.strerror if isinstance(error, OSError) else error.message
    log.warning("a file of an episode could not be kept", extra=fields(file=name, why=why))


def _over_limit(name: str, allowed_bytes: int, limit_bytes: int) -> AtCapacityError | LimitExceededError:
    if allowed_bytes < limit_bytes:
        return AtCapacityError(f"the server's disk is nearly full: there is no room for {name}")
    return LimitExceededError(f"{name} is over the limit of {limit_bytes} bytes", limitBytes=limit_bytes)
