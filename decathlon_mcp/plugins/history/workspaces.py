"""The files of an agent's workspace, from the archive that `--keep workspace` keeps.

The archive came out of the agent's sandbox. It is only read: no member is unpacked, and no name in it becomes
the path of a file.
"""

from __future__ import annotations

import gzip
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from decathlon_mcp.archives.reading import ArchiveReader, BrokenArchiveError, Kind
from decathlon_mcp.storage.disk import open_regular

KEPT_WORKSPACE: Final = "workspace.tar.gz"
"""The captured workspace in an episode's folder."""
MAX_LISTED = 1_000
MAX_READ_BYTES = 256 << 20
"""How far an archive is decompressed to find its members, about a second. Members behind are not listed."""
_KINDS = {Kind.FILE: "file", Kind.FOLDER: "folder", Kind.SYMLINK: "link", Kind.HARD_LINK: "link"}


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A member of the archive: its place from 0, and its name, which can be any text.

    `kind`: `file`, `folder`, `link` or `other`; only a file can be read. `target`: of a link.
    """

    number: int
    name: str
    kind: str
    size_bytes: int
    target: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """The members that were read. `is_cut`: there may be more. `fault`: why the rest cannot be read."""

    files: tuple[LeftFile, ...]
    is_cut: bool
    fault: str = ""


def list_workspace(folder: Path) -> Workspace | None:
    """The files that an agent left, of an episode's folder; None if they are not kept."""
    files: list[LeftFile] = []
    try:
        with _opened(folder) as archive:
            reader = ArchiveReader(archive, None)
            for file in _members(reader):
                files.append(file)
                if len(files) >= MAX_LISTED:
                    return Workspace(tuple(files), is_cut=True)
    except BrokenArchiveError as error:
        return Workspace(tuple(files), is_cut=True, fault=str(error))
    except OSError:
        return None
    return Workspace(tuple(files), is_cut=reader.end > MAX_READ_BYTES)


def read_left_file(folder: Path, number: int) -> tuple[LeftFile, Iterator[bytes]] | None:
    """One of the listed files with its content in chunks; None if there is no file with this number.

    Reading the chunks raises BrokenArchiveError where the archive is damaged.
    """
    workspace = list_workspace(folder)
    if workspace is None or not 0 <= number < len(workspace.files):
        return None
    file = workspace.files[number]
    return (file, _content(folder, number)) if file.kind == "file" else None


def _content(folder: Path, number: int) -> Iterator[bytes]:
    with _opened(folder) as archive:
        reader = ArchiveReader(archive, None)
        for file in _members(reader):
            if file.number == number:
                yield from reader.body()
                return


def _members(reader: ArchiveReader) -> Iterator[LeftFile]:
    """The members up to MAX_READ_BYTES. The root of the workspace is none. Raises BrokenArchiveError."""
    number = 0
    for member in reader:
        name = member.name.removeprefix("./").rstrip("/")
        if name not in ("", "."):
            kind = "other" if member.name_unreadable else _KINDS.get(member.kind, "other")
            yield LeftFile(number, name, kind, member.size if kind == "file" else 0, member.link)
            number += 1
        # To look for the next member would decompress all of this member's body.
        if reader.end > MAX_READ_BYTES:
            return


@contextmanager
def _opened(folder: Path) -> Generator[BinaryIO]:
    with open_regular(folder / KEPT_WORKSPACE) as kept, gzip.GzipFile(fileobj=kept) as archive:
        yield cast("BinaryIO", archive)
