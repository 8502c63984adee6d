"""What a sandbox's root file system consists of, as arguments of bubblewrap."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from decathlon_mcp.sandboxes.base import SCRATCH, Limits
from decathlon_mcp.sandboxes.users import SandboxUser

VOLATILE = (PurePosixPath("/run"), PurePosixPath("/var/tmp"))
"""Folders besides /tmp whose content no program expects to last. What the image has there is hidden."""
DEFAULT_MEMORY_MIB = 4096
"""What folders may hold together is derived from this, where a sandbox's memory has no limit."""
HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost\n"


@dataclass(frozen=True, slots=True)
class WritableFolder:
    """A file system in memory, at an absolute path inside. Its contents count as the sandbox's memory."""

    path: PurePosixPath
    size_bytes: int
    mode: int


@dataclass(slots=True)
class CopiedFiles:
    """Files whose content is copied into a sandbox. `stack` closes their descriptors."""

    stack: ExitStack
    descriptors: list[int] = field(default_factory=list[int])

    def add_content(self, content: bytes) -> str:
        """As `add`, for a new file with this content."""
        return self.add(file_with(content))

    def add(self, descriptor: int) -> str:
        """Take over an open file; returns how an argument names it."""
        self.stack.callback(os.close, descriptor)
        self.descriptors.append(descriptor)
        return str(descriptor)


class RootFiles(Protocol):
    """The files that a sandbox starts with, all of them read-only."""

    @property
    def user(self) -> SandboxUser: ...

    @property
    def owner(self) -> tuple[int, int]:
        """User and group, on this machine, that own the files."""
        ...

    @property
    def reached(self) -> tuple[Path, ...]:
        """Folders of this machine that the sandbox's user must be able to enter."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of the first process, without HOME."""
        ...

    @property
    def digest(self) -> str | None:
        """That of the image, `sha256:...`; None if there is none."""
        ...

    @property
    def location(self) -> Path | None:
        """The folder with the files; None if they are this machine's own."""
        ...

    def find_program(self, name: str) -> Path | None:
        """The file that a program's name means inside; None if there is none that can be executed."""
        ...

    def real_path(self, path: PurePosixPath) -> PurePosixPath:
        """The path without links: a mount must not follow them."""
        ...

    def first_mounts(self, mounts: Sequence[PurePosixPath], copied: CopiedFiles) -> Iterator[str]:
        """The files, with room for these mounts."""
        ...

    def mounts_in(self, folder: WritableFolder, copied: CopiedFiles) -> Iterator[str]:
        """The files in a folder that is writable and has just been mounted."""
        ...


def writable_folders(files: RootFiles, root: PurePosixPath, limits: Limits) -> list[WritableFolder]:
    """The suite's root, the user's home and folders for what does not last, those that contain others first.

    Together they hold less than the sandbox's memory, so that full folders alone do not end it.
    """
    memory = (limits.memory_mib or DEFAULT_MEMORY_MIB) << 20
    scratch = min(limits.scratch_mib << 20, memory // 8)
    home = files.user.home
    folders = [WritableFolder(root, memory // 2, 0o755), WritableFolder(SCRATCH, scratch, 0o1777)]
    folders += [WritableFolder(path, memory // 32, 0o1777) for path in VOLATILE if path != root]
    if not home.is_relative_to(root) and not home.is_relative_to(SCRATCH):
        folders.append(WritableFolder(home, memory // 8, 0o700))
    placed = [
        WritableFolder(files.real_path(folder.path), folder.size_bytes, folder.mode) for folder in folders
    ]
    return sorted(placed, key=lambda folder: len(folder.path.parts))


def file_with(content: bytes) -> int:
    """A descriptor of a file without a name, to be read from its beginning."""
    descriptor = os.memfd_create("decathlon", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def memory_mount(folder: WritableFolder) -> list[str]:
    size, mode = str(folder.size_bytes), f"{folder.mode:04o}"
    return ["--perms", mode, "--size", size, "--tmpfs", str(folder.path)]


def folder_entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted; nothing if it is missing."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def bind(path: Path, inside: PurePosixPath) -> Iterator[str]:
    """The same file, folder or link inside; nothing for others."""
    if path.is_symlink():
        yield from ("--symlink", str(path.readlink()), str(inside))
    elif path.is_dir() or path.is_file():
        yield from ("--ro-bind", str(path), str(inside))
