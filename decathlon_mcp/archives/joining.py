"""Joins archives into one, each below a folder of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.unpacking import checked_entries
from decathlon_mcp.archives.writing import (
    ArchiveSource,
    Entry,
    StreamedArchive,
    append,
    archive_size,
)
from decathlon_mcp.errors import BadRequestError


def append_archive(
    archive: Path, source: Path, prefix: PurePosixPath, names: Collection[str] | None = None
) -> None:
    """Append the members of `source` to the plain tar `archive`, with their names below `prefix`.

    `names`: only entries with one of these names directly below the folder that was packed. `prefix` and the
    folders above it become members too. Modes are reduced to permissions; times are kept in whole seconds.

    Raises BadRequestError if `source` is no whole archive or has a member that no sandbox unpacks: a FIFO, a
    device, a relative link that leads out, or a hard link to a file that is not copied. `archive` is then
    incomplete.
    """
    append(archive, _entries(source, prefix, names))


def joined(parts: Sequence[tuple[PurePosixPath, ArchiveSource]]) -> StreamedArchive:
    """One archive of several, in this order, each with the folder below which its members are placed.

    Those folders become members too, unless an earlier part has them. Every member is checked on its way from
    its part: reading it raises BadRequestError for a part that is no whole archive or has a member that no
    sandbox unpacks.
    """

    def entries() -> Iterator[Entry]:
        folders: set[str] = set()
        for prefix, archive in parts:
            for member, body in _entries(archive, prefix, None, folders):
                if member.kind is Kind.FOLDER:
                    folders.add(member.name)
                yield member, body

    return StreamedArchive(entries, sum(archive_size(archive) for _, archive in parts))


def _entries(
    archive: ArchiveSource,
    prefix: PurePosixPath,
    names: Collection[str] | None,
    existing: Collection[str] = (),
) -> Iterator[Entry]:
    for folder in (*reversed(prefix.parents[:-1]), prefix) if prefix.name else ():
        if str(folder) not in existing:
            yield Member(name=str(folder), kind=Kind.FOLDER, mode=0o755), ()
    for member, body in checked_entries(archive):
        if names is not None and member.name.partition("/")[0] not in names:
            continue
        if member.kind is Kind.HARD_LINK:
            if names is not None and member.link.partition("/")[0] not in names:
                raise BadRequestError(
                    f"{member.name!r} is the same file as {member.link!r}, which is removed"
                )
            if prefix.name:
                member = replace(member, link=f"{prefix}/{member.link}")
        yield replace(member, name=f"{prefix}/{member.name}") if prefix.name else member, body
