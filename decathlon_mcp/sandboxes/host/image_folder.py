"""A root file system in a folder of this machine: an unpacked image, or any folder with `/usr` and `/etc`.

An unpacked image is a folder with the file `image.json` and the folder `rootfs`; `decathlon-mcp doctor
--unpack` writes both. In any other folder, the folder itself is the root file system, and nothing is known
about it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.host.mounts import (
    GROUP,
    HOSTS,
    PASSWD,
    TABLE_BYTES,
    CopiedFiles,
    SandboxUser,
    WritableFolder,
    bind,
    find_user,
    folder_entries,
)
from decathlon_mcp.types import JsonObject, as_object

CONFIG_FILE = "image.json"
ROOT_FOLDER = "rootfs"
UNPACK = "decathlon-mcp doctor --unpack IMAGE DIR, then --image DIR"
CONFIG_VERSION = 1
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SANDBOX_USER = 1_900_000_000
"""User and group of sandboxes if the server is root, and owner of what root unpacks. Belongs to nobody: below
the ids that systemd and container engines give away (systemd, "Users, Groups, UIDs and GIDs"), and above
people's ids."""
MAX_LINKS = 40
"""Symbolic links that are followed on one path, as by the kernel."""
_CONFIG_BYTES = 1 << 20
COPIED_FILES = 32
COPIED_BYTES = 64 << 10
"""Files of the image's home are copied up to this number and size, so that they can be changed; other files
are there to be read."""
EXPANDED_LEVELS = 2
"""Hidden folders of the image's home, such as .cache/uv, are writable down to this level; what the image has
below can be read."""


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """A root file system and what is known about it: the files of a sandbox, see `mounts.RootFiles`.

    `root` is the folder below `location` that is / inside. `environment` are the image's variables, `digest`
    is the image's, `sha256:...`; None if it is not known.
    """

    location: Path
    root: Path
    owner: tuple[int, int]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    user: SandboxUser = field(default_factory=SandboxUser)
    digest: str | None = None

    reached = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ImageError if there is no root file system, or if its `image.json` cannot be read."""
        config_file = path / CONFIG_FILE
        config = _read_config(config_file) if config_file.exists() else {}
        root = path / ROOT_FOLDER if config else path
        try:
            status = (root / "usr").stat()
        except OSError as error:
            raise ImageError(
                f"{path} is no unpacked image: {error.strerror}: {root / 'usr'}; unpack one with "
                "`decathlon-mcp doctor --unpack IMAGE DIR`",
                image=str(path),
            ) from None
        environment = as_object(config.get("env")) or {}
        return cls(
            path,
            root,
            (status.st_uid, status.st_gid),
            {"PATH": DEFAULT_PATH, **{name: str(value) for name, value in environment.items()}},
            find_user(str(config.get("user") or ""), _table(root, PASSWD), _table(root, GROUP)),
            None if config.get("digest") is None else str(config["digest"]),
        )

    def find_program(self, name: str, *, outside: PurePosixPath | None = None) -> Path | None:
        """The file that a program's name means inside; None if there is none that can be executed.

        `outside`: what is in this folder does not count.
        """
        excluded = None if outside is None else self.resolve(outside)
        folders = [""] if "/" in name else self.environment["PATH"].split(":")
        for folder in folders:
            file = self.resolve(PurePosixPath("/", folder, name))
            if file is None or (excluded is not None and file.is_relative_to(excluded)):
                continue
            if file.is_file() and os.access(file, os.X_OK):
                return file
        return None

    def resolve(self, path: PurePosixPath) -> Path | None:
        """Where an absolute path inside is on this machine, all links followed as inside.

        None if it does not exist. The folder must not change meanwhile.
        """
        pending = list(reversed(path.parts[1:]))
        parts: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                parts = parts[:-1]
                continue
            here = self.root.joinpath(*parts, part)
            try:
                status = os.lstat(here)
            except OSError:
                return None
            if not stat.S_ISLNK(status.st_mode):
                parts.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                return None
            target = PurePosixPath(here.readlink())
            if target.is_absolute():
                parts = []
            pending += [part for part in reversed(target.parts) if part != "/"]
        return self.root.joinpath(*parts)

    def real_path(self, path: PurePosixPath) -> PurePosixPath:
        for existing in (path, *path.parents):
            resolved = self.resolve(existing)
            if resolved is not None:
                return PurePosixPath("/") / resolved.relative_to(self.root) / path.relative_to(existing)
        raise AssertionError("the root exists")

    def first_mounts(self, mounts: Sequence[PurePosixPath], copied: CopiedFiles) -> Iterator[str]:
        # Where the image lacks the folder for a mount, the folders above it are made of what the image has in
        # them: nothing can be created in the image itself.
        root = self.root
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
        home = self.real_path(self.user.home)
        if folder.path == home:
            yield from _home_mounts(self.root / home.relative_to("/"), home, copied, 0)


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


def _read_config(file: Path) -> JsonObject:
    try:
        with file.open("rb") as source:
            config = as_object(json.loads(source.read(_CONFIG_BYTES)))
    except (OSError, ValueError) as error:
        raise ImageError(f"{file} cannot be read: {error}", image=str(file.parent)) from None
    if config is None or config.get("version") != CONFIG_VERSION:
        raise ImageError(f"{file} is not of this version: unpack the image again", image=str(file.parent))
    return config


def _table(root: Path, path: str) -> bytes:
    """The beginning of an image's table of users or groups; empty if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(root / path.lstrip("/"), flags), "rb") as source:
            return source.read(TABLE_BYTES)
    except OSError:
        return b""
