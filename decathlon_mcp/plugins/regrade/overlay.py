"""Joins what preprocess made of a task's folder with a newer checkout of the same folder.

A task's folder as preprocess left it contains both the suite's files of that day and what preprocess wrote.
A later grading takes the first from the checkout as it is then, and the second from the archive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from decathlon_mcp.archives.reading import Body, Kind, Member, digest_of
from decathlon_mcp.archives.unpacking import checked_entries
from decathlon_mcp.archives.writing import Entry, archive_chunks, save

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
