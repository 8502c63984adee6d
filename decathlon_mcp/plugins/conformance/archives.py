"""Helpers of checks: archives that are put into a sandbox and fetched from it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.reading import ArchiveReader, Kind, Member
from decathlon_mcp.archives.writing import Entry, archive_chunks
from decathlon_mcp.sandboxes.base import Sandbox


def file_entry(name: str, content: bytes = b"", mode: int = 0o644) -> Entry:
    """A file of an archive, owned by nobody in particular."""
    member = Member(name=name, kind=Kind.FILE, size=len(content), mode=mode, user=1234, group=1234)
    return member, (content,)


def link_entry(name: str, target: str, kind: Kind = Kind.SYMLINK) -> Entry:
    return Member(name=name, kind=kind, link=target, mode=0o777), ()


def pack(*entries: Entry) -> bytes:
    """A whole archive."""
    return b"".join(archive_chunks(entries))


async def download(
    sandbox: Sandbox, folder: PurePosixPath, archive: Path, limit_bytes: int = 1 << 28
) -> dict[str, tuple[Member, bytes]]:
    """What `Sandbox.get` packed: each member and its content, by its name without "./"."""
    await sandbox.get(folder, archive, limit_bytes)
    return {
        member.name.removeprefix("./").rstrip("/"): (member, content)
        for member, content in read_archive(archive)
    }


def read_archive(archive: Path) -> list[tuple[Member, bytes]]:
    """Each member of an archive, and its content."""
    with archive.open("rb") as file:
        reader = ArchiveReader.of_file(file)
        return [(member, b"".join(reader.body())) for member in reader]
