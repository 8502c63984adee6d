"""A file tree in memory: what `put`, `get` and `arrange` act on in a fake sandbox."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from decathlon_mcp.archives.archive import content, header, info_of, members, padding, parts_of, reading
from decathlon_mcp.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class DriverClient:
    target: str


@dataclass(frozen=True, slots=True)
class Folder:
    mode: int = 0o755


Node = File | DriverClient | Folder


class Tree:
    """Absolute paths to nodes. A link is never followed."""

    def __init__(self) -> None:
        self._nodes: dict[PurePosixPath, Node] = {PurePosixPath("/"): Folder()}

    def __getitem__(self, path: PurePosixPath | str) -> Node:
        return self._nodes[PurePosixPath(path)]

    def __contains__(self, path: PurePosixPath | str) -> bool:
        return PurePosixPath(path) in self._nodes

    def text(self, path: PurePosixPath | str) -> str:
        """A file's text. Raises FileNotFoundError where there is none."""
        node = self._nodes.get(PurePosixPath(path))
        if not isinstance(node, File):
            raise FileNotFoundError(str(path))
        return node.data.decode()

    def write(self, path: PurePosixPath | str, data: bytes | str, mode: int = 0o644) -> None:
        """A file, its folders made where they are missing."""
        path = PurePosixPath(path)
        self.make(path.parent)
        self._nodes[path] = File(data.encode() if isinstance(data, str) else data, mode)

    def make(self, folder: PurePosixPath | str) -> None:
        folder = PurePosixPath(folder)
        for path in (*reversed(folder.parents), folder):
            if not isinstance(self._nodes.setdefault(path, Folder()), Folder):
                raise NotADirectoryError(str(path))

    def remove(self, path: PurePosixPath | str) -> None:
        for each in tuple(self.below(PurePosixPath(path))):
            del self._nodes[each]

    def copy(self, source: PurePosixPath | str, to: PurePosixPath | str) -> None:
        """What is in folder `source` goes into folder `to`."""
        source, to = PurePosixPath(source), PurePosixPath(to)
        if not isinstance(self._nodes.get(source), Folder):
            raise FileNotFoundError(str(source))
        self.make(to)
        for path in tuple(self.below(source)):
            self._nodes[to / path.relative_to(source)] = self._nodes[path]

    def below(self, folder: PurePosixPath | str) -> Iterator[PurePosixPath]:
        """The path itself, where there is something, and all below it, in order."""
        return (path for path in sorted(self._nodes) if path.is_relative_to(folder))

    def put(self, folder: PurePosixPath, archive: Path | bytes) -> None:
        name = str(folder)
        try:
            self.make(folder)
            with reading(archive) as tar:
                for parts, info in members(tar):
                    name, path = info.name, folder.joinpath(*parts)
                    self.make(path.parent)
                    self._place(path, self._unpacked(tar, info, folder))
        except (NotADirectoryError, IsADirectoryError, KeyError) as error:
            raise BadRequestError(f"cannot unpack {name!r}: {error}") from error

    def _place(self, path: PurePosixPath, node: Node) -> None:
        if isinstance(node, Folder):
            self.make(path)
        elif isinstance(self._nodes.get(path), Folder):
            raise IsADirectoryError(str(path))
        self._nodes[path] = node

    def _unpacked(self, tar: tarfile.TarFile, info: tarfile.TarInfo, folder: PurePosixPath) -> Node:
        if info.isdir():
            return Folder(info.mode & 0o777)
        if info.issym():
            return DriverClient(info.linkname)
        if info.islnk():
            return self._nodes[folder.joinpath(*parts_of(info.linkname))]
        with content(tar, info) as file:
            return File(file.read(), info.mode & 0o777)

    def get(self, folder: PurePosixPath) -> Iterator[bytes]:
        """A tar of what is in `folder`, in pieces; without members where that is no folder."""
        found = self.below(folder) if isinstance(self._nodes.get(folder), Folder) else ()
        for path in found:
            node, name = self._nodes[path], f"./{path.relative_to(folder)}" if path != folder else "."
            if isinstance(node, Folder):
                yield header(info_of(name, tarfile.DIRTYPE, node.mode, 0))
            elif isinstance(node, DriverClient):
                info = info_of(name, tarfile.SYMTYPE, 0o777, 0)
                info.linkname = node.target
                yield header(info)
            else:
                info = info_of(name, tarfile.REGTYPE, node.mode, 0)
                info.size = len(node.data)
                yield header(info) + node.data + padding(info.size)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def arrange(self, step: dict[str, Any]) -> None:
        """One step of the wire's `arrange`. Raises OSError where the driver would fail."""
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
            case _:
                raise OSError(f"no such step: {step}")

    def _check_absent(self, names: Iterable[str], under: str, but: Iterable[str]) -> None:
        spared = [PurePosixPath(folder) for folder in but]
        wanted = set(names)
        for path in self.below(under):
            if any(path.is_relative_to(folder) for folder in spared):
                continue
            if str(path) in wanted or (path.name in wanted and str(path) != under):
                raise FileExistsError(f"{path} is there")
