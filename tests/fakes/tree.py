"""In-memory file system of a fake sandbox, with the operations `put`, `get` and `arrange`."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from decathlon_mcp.archives.reading import Body, Kind, Member
from decathlon_mcp.archives.unpacking import checked_entries
from decathlon_mcp.archives.writing import ArchiveSource, Entry, archive_chunks
from decathlon_mcp.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Link:
    target: str


@dataclass(frozen=True, slots=True)
class Folder:
    mode: int = 0o755


Node = File | Link | Folder


class Tree:
    """Nodes by absolute path. Links are never followed."""

    def __init__(self) -> None:
        self._nodes: dict[PurePosixPath, Node] = {PurePosixPath("/"): Folder()}
        self._marked: dict[PurePosixPath, Node] = {}

    def __getitem__(self, path: PurePosixPath | str) -> Node:
        return self._nodes[PurePosixPath(path)]

    def __contains__(self, path: PurePosixPath | str) -> bool:
        return PurePosixPath(path) in self._nodes

    def text(self, path: PurePosixPath | str) -> str:
        """Return a file's text. Raises FileNotFoundError if there is no such file."""
        node = self._nodes.get(PurePosixPath(path))
        if not isinstance(node, File):
            raise FileNotFoundError(str(path))
        return node.data.decode()

    def write(self, path: PurePosixPath | str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file and create missing parents."""
        path = PurePosixPath(path)
        self.make(path.parent)
        self._nodes[path] = File(data.encode() if isinstance(data, str) else data, mode)

    def make(self, folder: PurePosixPath | str) -> None:
        folder = PurePosixPath(folder)
        if isinstance(self._nodes.get(folder), Folder):
            return
        for path in (*reversed(folder.parents), folder):
            if not isinstance(self._nodes.setdefault(path, Folder()), Folder):
                raise NotADirectoryError(str(path))

    def remove(self, path: PurePosixPath | str) -> None:
        for node in tuple(self.below(PurePosixPath(path))):
            del self._nodes[node]

    def copy(self, source: PurePosixPath | str, to: PurePosixPath | str) -> None:
        """Copy the content of folder `source` into folder `to`."""
        source, to = PurePosixPath(source), PurePosixPath(to)
        if not isinstance(self._nodes.get(source), Folder):
            raise FileNotFoundError(str(source))
        self.make(to)
        for path in tuple(self.below(source)):
            self._nodes[to / path.relative_to(source)] = self._nodes[path]

    def below(self, folder: PurePosixPath | str) -> Iterator[PurePosixPath]:
        """Return the path itself, if it exists, and all paths below it, sorted."""
        top = PurePosixPath(folder)
        prefix = f"{str(top).rstrip('/')}/"
        # `is_relative_to` would take a fifth of a test's time.
        return iter(sorted(path for path in self._nodes if path == top or str(path).startswith(prefix)))

    def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        name = str(folder)
        try:
            self.make(folder)
            for member, body in checked_entries(archive):
                name, path = member.name, folder / member.name
                self.make(path.parent)
                self._place(path, self._node(member, body, folder))
        except (NotADirectoryError, IsADirectoryError, KeyError) as error:
            raise BadRequestError(f"cannot unpack {name!r}: {error}") from error

    def _place(self, path: PurePosixPath, node: Node) -> None:
        if isinstance(node, Folder):
            self.make(path)
        elif isinstance(self._nodes.get(path), Folder):
            raise IsADirectoryError(str(path))
        self._nodes[path] = node

    def _node(self, member: Member, body: Body, folder: PurePosixPath) -> Node:
        match member.kind:
            case Kind.FOLDER:
                return Folder(member.mode)
            case Kind.SYMLINK:
                return Link(member.link)
            case Kind.HARD_LINK:
                return self._nodes[folder / member.link]
            case _:
                return File(b"".join(body), member.mode)

    def get(self, folder: PurePosixPath) -> Iterator[bytes]:
        """Return a tar of `folder` in chunks; it has no members if `folder` is not a folder."""
        paths = self.below(folder) if isinstance(self._nodes.get(folder), Folder) else ()
        return archive_chunks(self._entry(path, folder) for path in paths)

    def _entry(self, path: PurePosixPath, folder: PurePosixPath) -> Entry:
        name = "." if path == folder else f"./{path.relative_to(folder)}"
        match self._nodes[path]:
            case Folder(mode):
                return Member(name=name, kind=Kind.FOLDER, mode=mode), ()
            case Link(target):
                return Member(name=name, kind=Kind.SYMLINK, mode=0o777, link=target), ()
            case File(data, mode):
                return Member(name=name, kind=Kind.FILE, mode=mode, size=len(data)), (data,)

    def mark(self) -> None:
        """Remember the present state for `clean`."""
        self._marked = dict(self._nodes)

    def clean(self, exceptions: Iterable[str]) -> list[str]:
        """Remove what changed in /tmp since `mark`; return the other changed paths."""
        exempt = [PurePosixPath(path) for path in exceptions]
        changed = [
            path
            for path in sorted(self._nodes)
            if self._marked.get(path) is not self._nodes[path]
            and not any(path.is_relative_to(exception) for exception in exempt)
        ]
        for path in changed:
            if path.is_relative_to("/tmp") and path != PurePosixPath("/tmp"):
                del self._nodes[path]
        return [str(path) for path in changed if not path.is_relative_to("/tmp")]

    def arrange(self, step: dict[str, Any]) -> None:
        """Execute one step of an `arrange` request. Raises OSError if the driver would fail."""
        match step:
            case {"make": folder}:
                self.make(folder)
            case {"copy": source, "to": to}:
                self.copy(source, to)
            case {"remove": path}:
                self.remove(path)
            case {"write": path, "text": text}:
                self.write(path, text, step.get("mode") or 0o644)
            case {"absent": names, "under": under}:
                self._check_absent(names, under, step.get("except", ()))
            case {"unpack": folder, "tar": archive}:
                try:
                    self.put(PurePosixPath(folder), base64.b64decode(archive))
                except BadRequestError as error:
                    raise OSError(str(error)) from error
            case _:
                raise OSError(f"no such step: {step}")

    def pack(self, folder: PurePosixPath) -> bytes:
        """What the method `pack` replies, without base64."""
        paths = self.below(folder) if isinstance(self._nodes.get(folder), Folder) else ()
        entries = (self._entry(path, folder) for path in paths if path != folder)
        return b"".join(
            archive_chunks((replace(member, name=member.name[2:]), body) for member, body in entries)
        )

    def _check_absent(self, names: Iterable[str], under: str, exceptions: Iterable[str]) -> None:
        exempt = [PurePosixPath(folder) for folder in exceptions]
        forbidden = set(names)
        for path in self.below(under):
            if any(path.is_relative_to(folder) for folder in exempt):
                continue
            if str(path) in forbidden or (path.name in forbidden and str(path) != under):
                raise FileExistsError(f"{path} is there")
