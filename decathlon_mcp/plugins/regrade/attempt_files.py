"""Files that a later grading needs, in the folder of an episode: complete or absent.

A task's folder as preprocess left it contains both the suite's files of that day and what preprocess wrote.
A later grading takes the first from the checkout as it is then, and the second from the kept archive.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from secrets import token_hex

import anyio.from_thread
from msgspec.structs import replace

from decathlon_mcp.archives.reading import Body, Kind, Member, digest_of
from decathlon_mcp.archives.unpacking import checked_entries
from decathlon_mcp.archives.writing import Entry, archive_chunks, save
from decathlon_mcp.errors import AtCapacityError, BadRequestError, LimitExceededError
from decathlon_mcp.storage.disk import create_private, open_regular
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.types import JsonObject, read_object

CHUNK_BYTES = 1 << 20
COMPRESSION_LEVEL = 1
"""gzip's fastest: the grading waits for it, and it takes most of what there is to gain from text."""
MAX_VERDICTS = 10_000
"""Verdicts of one episode. A limit on the search for a free name."""


class AttemptFiles(KeptFiles):
    """The kept files of one attempt. All methods block: run them in a worker thread."""

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


def _over_limit(name: str, allowed_bytes: int, limit_bytes: int) -> AtCapacityError | LimitExceededError:
    if allowed_bytes < limit_bytes:
        return AtCapacityError(f"the server's disk is nearly full: there is no room for {name}")
    return LimitExceededError(f"{name} is over the limit of {limit_bytes} bytes", limitBytes=limit_bytes)


FOLDER = "folder"
"""Content id of a folder."""
_CACHE = "__pycache__"


def content_ids(archive: Path, folder: PurePosixPath) -> dict[str, str]:
    """The entries of an archive below `folder`, by their path in it, each with an id of its content.

    The id of a file is the SHA-256 of its content, that of a symlink begins with `->`. Modes and times do not
    count; Python's caches are left out. Blocks. Raises BadRequestError.
    """
    return {name: entry.id for name, entry in _scan(archive, folder).items()}


def overlay(
    checkout: Path,
    preprocessed: Path,
    into: Path,
    *,
    folder: PurePosixPath,
    original: Mapping[str, str],
) -> None:
    """Write a task's folder, with names relative to it, as preprocess would have left it today.

    `checkout`: archive of the suite's files, the task's below `folder`. `preprocessed`: archive of the task's
    folder after preprocess. `original`: `content_ids` of the task's folder before preprocess. What preprocess
    created or changed comes from `preprocessed`, what it removed is absent, and the rest is the checkout's.
    Blocks. Raises BadRequestError for a broken archive.
    """
    after = _scan(preprocessed, PurePosixPath())
    written = _written_by_preprocess(after, original)
    removed = original.keys() - after.keys()

    def entries() -> Iterator[Entry]:
        yield from _unchanged(checkout, folder, {name: after[name].kind for name in written}, removed)
        for member, body in checked_entries(preprocessed):
            if member.name in written:
                yield member, body

    save(archive_chunks(entries()), into)


class _Scanned:
    """One entry: its kind, the id of its content and, of a hard link, the name of the file in the archive."""

    __slots__ = ("id", "kind", "root")

    def __init__(self, kind: Kind, content_id: str, root: str) -> None:
        self.kind = kind
        self.id = content_id
        self.root = root


def _scan(archive: Path, folder: PurePosixPath) -> dict[str, _Scanned]:
    found: dict[str, _Scanned] = {}
    for member, body in checked_entries(archive):
        name = _relative(member.name, folder)
        if name is None:
            continue
        if member.kind is Kind.HARD_LINK:
            target = found.get(_relative(member.link, folder) or "")
            if target is not None:
                found[name] = _Scanned(member.kind, target.id, target.root)
                continue
        found[name] = _Scanned(member.kind, _content_id(member, body), name)
    return found


def _relative(name: str, folder: PurePosixPath) -> str | None:
    """A member's name relative to `folder`; None if it is not below it or is a cache."""
    path = PurePosixPath(name)
    if _CACHE in path.parts or not path.is_relative_to(folder) or path == folder:
        return None
    return str(path.relative_to(folder))


def _content_id(member: Member, body: Body) -> str:
    match member.kind:
        case Kind.FOLDER:
            return FOLDER
        case Kind.FILE:
            return digest_of(body)
        case _:
            return f"->{member.link}"


def _written_by_preprocess(after: Mapping[str, _Scanned], original: Mapping[str, str]) -> set[str]:
    """The entries that preprocess created or changed.

    A file with several names counts as a whole: the archive has its content under one of them only.
    """
    roots = {entry.root for name, entry in after.items() if original.get(name) != entry.id}
    return {name for name, entry in after.items() if entry.root in roots}


def _unchanged(
    checkout: Path, folder: PurePosixPath, written: Mapping[str, Kind], removed: Collection[str]
) -> Iterator[Entry]:
    """The members of the checkout that preprocess neither changed nor removed."""
    above_written = {str(parent) for name in written for parent in PurePosixPath(name).parents}
    for member, body in checked_entries(checkout):
        name = _relative(member.name, folder)
        if name is None or name in written or name in removed:
            continue
        if member.kind is not Kind.FOLDER and name in above_written:
            continue
        parents = map(str, PurePosixPath(name).parents)
        if any(written.get(parent, Kind.FOLDER) is not Kind.FOLDER for parent in parents):
            continue
        yield replace(member, name=name), body
