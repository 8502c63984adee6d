"""Files of a fake sandbox: a temporary folder, changed by the product's own code for files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from decathlon_sandbox.archives import pack
from decathlon_sandbox.driver_requests import RequestError
from decathlon_sandbox.files import run_steps

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.types import JsonObject

_PATHS = ("make", "copy", "to", "remove", "write", "under", "unpack")
"""Keys of the steps of `arrange` whose values are paths."""
Paths = PurePosixPath | str


class Tree:
    """Paths are absolute in the sandbox. `machine`: where its folder is. `other`: what it is a copy of."""

    def __init__(self, machine: str, other: Tree | None = None) -> None:
        self._folder = tempfile.mkdtemp(dir=machine)
        self._marked: dict[PurePosixPath, object] = {}
        if other is not None:
            shutil.copytree(other._folder, self._folder, symlinks=True, dirs_exist_ok=True)
            self._marked = {path: self._state(path) for path in self.below("/")}

    def __contains__(self, path: Paths) -> bool:
        return os.path.lexists(self.place(path))

    def text(self, path: Paths) -> str:
        return self.place(path).read_text()

    def write(self, path: Paths, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file and create missing parents."""
        self.make(PurePosixPath(path).parent)
        self.place(path).write_bytes(data.encode() if isinstance(data, str) else data)
        self.place(path).chmod(mode)

    def make(self, folder: Paths) -> None:
        self.place(folder).mkdir(parents=True, exist_ok=True)

    def below(self, folder: Paths) -> list[PurePosixPath]:
        """The path itself, if it exists, and all paths below it, sorted."""
        top = self.place(folder)
        found = [path for path in (top, *top.rglob("*")) if os.path.lexists(path)]
        return sorted(PurePosixPath("/", path.relative_to(self._folder)) for path in found)

    def put(self, folder: Paths, archive: ArchiveSource) -> None:
        unpack(archive, self.place(folder), below=Path(self._folder))

    def get(self, folder: Paths, archive: Path, limit_bytes: int) -> None:
        pack_folder(self.place(folder), archive, limit_bytes, below=Path(self._folder))

    def arrange(self, steps: Iterable[JsonObject]) -> None:
        """Raises RequestError."""
        here = [{k: str(self.place(v)) if k in _PATHS else v for k, v in step.items()} for step in steps]
        try:
            run_steps(here)
        except RequestError as error:
            message = error.message.replace(self._folder, "")
            raise RequestError(error.code, message, error.data) from None

    def pack(self, folder: Paths, max_bytes: int) -> str:
        return pack(str(self.place(folder)), max_bytes)

    def mark(self) -> None:
        """Remember the present state for `clean`."""
        self._marked = {path: self._state(path) for path in self.below("/")}

    def clean(self, exceptions: Iterable[str]) -> list[str]:
        """Remove what changed in /tmp since `mark`; return the other changed paths."""
        changed = [
            path
            for path in self.below("/")
            if self._marked.get(path) != self._state(path)
            and not any(path.is_relative_to(exception) for exception in exceptions)
        ]
        temporary = [path for path in changed if PurePosixPath("/tmp") in path.parents]
        self.arrange({"remove": str(path)} for path in temporary)
        return [str(path) for path in changed if not path.is_relative_to("/tmp")]

    def _state(self, path: PurePosixPath) -> object:
        status = self.place(path).lstat()
        return "folder" if self.place(path).is_dir() else (status.st_ino, status.st_mtime_ns)

    def place(self, path: Paths) -> Path:
        """Where a path is on this machine."""
        return Path(self._folder, str(path).lstrip("/"))
