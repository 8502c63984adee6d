"""Copies members of one archive to the end of another, below another folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.reading import ArchiveReader, Kind, Member
from decathlon_mcp.archives.unpacking import checked_members, open_archive
from decathlon_mcp.archives.writing import Entry, archive_chunks
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
    with archive.open("r+b") as file:
        reader = ArchiveReader.of_file(file)
        for _ in reader:
            pass
        file.seek(reader.end)
        with open_archive(source) as members:
            for chunk in archive_chunks(_entries(members, prefix, names)):
                file.write(chunk)
        file.truncate()


def _entries(reader: ArchiveReader, prefix: PurePosixPath, names: Collection[str] | None) -> Iterator[Entry]:
    for folder in (*reversed(prefix.parents[:-1]), prefix):
        yield Member(name=str(folder), kind=Kind.FOLDER, mode=0o755), ()
    for member in checked_members(reader):
        if names is not None and member.name.partition("/")[0] not in names:
            continue
        if member.kind is Kind.HARD_LINK:
            if names is not None and member.link.partition("/")[0] not in names:
                raise BadRequestError(
                    f"{member.name!r} is the same file as {member.link!r}, which is removed"
                )
            member = replace(member, link=str(prefix / member.link))
        body = reader.body() if member.kind is Kind.FILE else ()
        yield replace(member, name=str(prefix / member.name)), body
