"""An unpacked image as the root file system of a sandbox."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from decathlon_mcp.sandboxes.bubblewrap.image_folder import ImageFolder
from decathlon_mcp.sandboxes.bubblewrap.mounts import (
    HOSTS,
    CopiedFiles,
    SandboxUser,
    WritableFolder,
    bind,
    folder_entries,
)

COPIED_FILES = 32
COPIED_BYTES = 64 << 10
"""Files of the image's home are copied up to this number and size, so that they can be changed; other files
are there to be read."""
EXPANDED_LEVELS = 2
"""Hidden folders of the image's home, such as .cache/uv, are writable down to this level; what the image has
below can be read."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """See `mounts.RootFiles`."""

    image: ImageFolder

    @property
    def user(self) -> SandboxUser:
        return self.image.user

    @property
    def owner(self) -> tuple[int, int]:
        return self.image.owner

    @property
    def environment(self) -> Mapping[str, str]:
        return self.image.environment

    @property
    def digest(self) -> str | None:
        return self.image.digest

    @property
    def location(self) -> Path | None:
        return self.image.path

    def find_program(self, name: str) -> Path | None:
        return self.image.find_program(name)

    def real_path(self, path: PurePosixPath) -> PurePosixPath:
        for existing in (path, *path.parents):
            resolved = self.image.resolve(existing)
            if resolved is not None:
                return PurePosixPath("/") / resolved.relative_to(self.image.root) / path.relative_to(existing)
        raise AssertionError("the root exists")

    def first_mounts(self, mounts: Sequence[PurePosixPath], copied: CopiedFiles) -> Iterator[str]:
        # Where the image lacks the folder for a mount, the folders above it are made of what the image has in
        # them: nothing can be created in the image itself.
        root = self.image.root
        missing = [path for path in mounts if not (root / path.relative_to("/")).is_dir()]
        expanded = {
            parent for path in missing for parent in path.parents if (root / parent.relative_to("/")).is_dir()
        }
        if not expanded:
            yield from ("--ro-bind", str(root), "/")
        for folder in sorted(expanded, key=lambda path: len(path.parts)):
            if folder.name:
                yield from ("--dir", str(folder))
            for entry in folder_entries(root / folder.relative_to("/")):
                inside = folder / entry.name
                if inside not in expanded and inside not in mounts:
                    yield from bind(Path(entry.path), inside)
        hosts = root / "etc" / "hosts"
        if (
            hosts.is_file()
            and not hosts.is_symlink()
            and "localhost" not in hosts.read_text("utf-8", "replace")
        ):
            yield from ("--perms", "0644", "--ro-bind-data", copied.add_content(HOSTS), "/etc/hosts")

    def mounts_in(self, folder: WritableFolder, copied: CopiedFiles) -> Iterator[str]:
        home = self.real_path(self.image.user.home)
        if folder.path == home:
            yield from _home_mounts(self.image.root / home.relative_to("/"), home, copied, 0)


def _home_mounts(folder: Path, inside: PurePosixPath, copied: CopiedFiles, level: int) -> Iterator[str]:
    """What the image has in the home of its user, in the file system that is mounted there."""
    for entry in folder_entries(folder):
        target = inside / entry.name
        status = entry.stat(follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and level < EXPANDED_LEVELS and (level or entry.name.startswith(".")):
            yield from ("--dir", str(target))
            yield from _home_mounts(Path(entry.path), target, copied, level + 1)
        elif (
            stat.S_ISREG(status.st_mode)
            and status.st_size <= COPIED_BYTES
            and len(copied.descriptors) < COPIED_FILES
            and os.access(entry.path, os.R_OK)
        ):
            name = copied.add(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
            mode = f"{status.st_mode & 0o777 | 0o600:04o}"
            yield from ("--perms", mode, "--file", name, str(target))
        else:
            yield from bind(Path(entry.path), target)
