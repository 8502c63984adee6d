"""The command line of bubblewrap (bwrap(1), version 0.7 or later) for one sandbox."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.bubblewrap.image_folder import ImageFolder

HOST_NAME = "sandbox"
SCRATCH = PurePosixPath("/tmp")
SHARED_MEMORY_BYTES = 64 << 20
"""Size of /dev/shm, as in a container."""
VOLATILE = (PurePosixPath("/run"), PurePosixPath("/var/tmp"))
"""Folders besides /tmp whose content no program expects to last. What the image has there is hidden."""
DEFAULT_MEMORY_MIB = 4096
"""What folders may hold together is derived from this, where a sandbox's memory has no limit."""
COPIED_FILES = 32
COPIED_BYTES = 64 << 10
"""Files of the image's home are copied up to this number and size, so that they can be changed; other files
are there to be read."""
EXPANDED_LEVELS = 2
"""Hidden folders of the image's home, such as .cache/uv, are writable down to this level; what the image has
below can be read."""
_VIRTUAL = (PurePosixPath("/proc"), PurePosixPath("/dev"))
_NAMESPACES = ("user", "pid", "net", "ipc", "uts")


@dataclass(frozen=True, slots=True)
class WritableFolder:
    """A file system in memory, at an absolute path inside. Its contents count as the sandbox's memory."""

    path: PurePosixPath
    size_bytes: int
    mode: int


def writable_folders(image: ImageFolder, root: PurePosixPath, limits: Limits) -> list[WritableFolder]:
    """The suite's root, the user's home and folders for what does not last, those that contain others first.

    Together they hold less than the sandbox's memory, so that full folders alone do not end it.
    """
    memory = (limits.memory_mib or DEFAULT_MEMORY_MIB) << 20
    scratch = min(limits.scratch_mib << 20, memory // 8)
    folders = [WritableFolder(root, memory // 2, 0o755), WritableFolder(SCRATCH, scratch, 0o1777)]
    folders += [WritableFolder(path, memory // 32, 0o1777) for path in VOLATILE if path != root]
    if not image.user.home.is_relative_to(root) and not image.user.home.is_relative_to(SCRATCH):
        folders.append(WritableFolder(image.user.home, memory // 8, 0o700))
    placed = [
        WritableFolder(_real_path(image, folder.path), folder.size_bytes, folder.mode) for folder in folders
    ]
    return sorted(placed, key=lambda folder: len(folder.path.parts))


def _real_path(image: ImageFolder, path: PurePosixPath) -> PurePosixPath:
    """The path without links of the image: a mount must not follow them."""
    for existing in (path, *path.parents):
        resolved = image.resolve(existing)
        if resolved is not None:
            return PurePosixPath("/") / resolved.relative_to(image.root) / path.relative_to(existing)
    raise AssertionError("the root exists")


@dataclass(frozen=True, slots=True)
class SandboxFiles:
    """Open files that bubblewrap uses, by descriptor.

    `status`: it writes there which process is the first one, and its exit code. `block`: one end of a socket
    from which it reads a byte when everything is set up, and closes it. `seccomp` and `hosts`: the filter,
    and a file for /etc/hosts if the image's does not have `localhost`.
    """

    status: int
    block: int
    seccomp: int
    hosts: int


def bubblewrap_command(
    program: str,
    spec: SandboxSpec,
    image: ImageFolder,
    files: SandboxFiles,
    stack: ExitStack,
) -> tuple[list[str], list[int]]:
    """The command line, and descriptors of further files that it needs; `stack` closes those."""
    folders = writable_folders(image, spec.root, spec.limits)
    home = _real_path(image, image.user.home)
    copied: list[int] = []
    command = [program, *(f"--unshare-{name}" for name in _NAMESPACES), "--unshare-cgroup-try"]
    command += ["--uid", str(image.user.user), "--gid", str(image.user.group), "--hostname", HOST_NAME]
    command += ["--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    if not spec.survives:
        command.append("--die-with-parent")
    command += ["--json-status-fd", str(files.status), "--block-fd", str(files.block)]
    command += ["--seccomp", str(files.seccomp)]
    command.append("--clearenv")
    for name, value in _environment(image).items():
        command += ["--setenv", name, value]
    command += _root_mounts(image, [*_VIRTUAL, *(folder.path for folder in folders)])
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    command += _memory_mount(WritableFolder(PurePosixPath("/dev/shm"), SHARED_MEMORY_BYTES, 0o1777))
    command += ["--remount-ro", "/dev"]
    for folder in folders:
        command += _memory_mount(folder)
        if folder.path == home:
            command += _home_mounts(image, home, copied, stack)
    command += _hosts_mount(image, files.hosts)
    # After everything has been created in it.
    command += ["--remount-ro", "/", "--chdir", str(spec.root), "--", *spec.command]
    return command, copied


def _environment(image: ImageFolder) -> Mapping[str, str]:
    return {**image.environment, "HOME": str(image.user.home)}


def _memory_mount(folder: WritableFolder) -> list[str]:
    size, mode = str(folder.size_bytes), f"{folder.mode:04o}"
    return ["--perms", mode, "--size", size, "--tmpfs", str(folder.path)]


def _root_mounts(image: ImageFolder, mounts: Sequence[PurePosixPath]) -> Iterator[str]:
    """The image's files, read-only, with room for these mounts.

    Where the image lacks the folder for one, the folders above it are made of what the image has in them:
    nothing can be created in the image itself.
    """
    missing = [path for path in mounts if not (image.root / path.relative_to("/")).is_dir()]
    expanded = {
        parent
        for path in missing
        for parent in path.parents
        if (image.root / parent.relative_to("/")).is_dir()
    }
    if not expanded:
        yield from ("--ro-bind", str(image.root), "/")
    for folder in sorted(expanded, key=lambda path: len(path.parts)):
        if folder.name:
            yield from ("--dir", str(folder))
        for entry in _entries(image.root / folder.relative_to("/")):
            inside = folder / entry.name
            if inside not in expanded and inside not in mounts:
                yield from _bind(entry, inside)


def _home_mounts(
    image: ImageFolder, home: PurePosixPath, copied: list[int], stack: ExitStack
) -> Iterator[str]:
    """What the image has in the home of its user, in the file system that is mounted there."""

    def mounts(folder: Path, inside: PurePosixPath, level: int) -> Iterator[str]:
        for entry in _entries(folder):
            target = inside / entry.name
            status = entry.stat(follow_symlinks=False)
            is_folder = stat.S_ISDIR(status.st_mode)
            if is_folder and level < EXPANDED_LEVELS and (level or entry.name.startswith(".")):
                yield from ("--dir", str(target))
                yield from mounts(Path(entry.path), target, level + 1)
            elif (
                stat.S_ISREG(status.st_mode)
                and status.st_size <= COPIED_BYTES
                and len(copied) < COPIED_FILES
                and os.access(entry.path, os.R_OK)
            ):
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                copied.append(descriptor)
                mode = f"{status.st_mode & 0o777 | 0o600:04o}"
                yield from ("--perms", mode, "--file", str(descriptor), str(target))
            else:
                yield from _bind(entry, target)

    yield from mounts(image.root / home.relative_to("/"), home, 0)


def _hosts_mount(image: ImageFolder, hosts: int) -> Iterator[str]:
    file = image.root / "etc" / "hosts"
    if file.is_file() and not file.is_symlink() and "localhost" not in file.read_text("utf-8", "replace"):
        yield from ("--perms", "0644", "--ro-bind-data", str(hosts), "/etc/hosts")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted; nothing if it is missing."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _bind(entry: os.DirEntry[str], inside: PurePosixPath) -> Iterator[str]:
    """The same file, folder or link inside; nothing for others."""
    if entry.is_symlink():
        yield from ("--symlink", os.readlink(entry.path), str(inside))  # noqa: PTH115
    elif entry.is_dir() or entry.is_file():
        yield from ("--ro-bind", entry.path, str(inside))
