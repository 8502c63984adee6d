"""Small file systems that a test can fill, and a folder in memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 2 << 30
"""The fast tests leave 100 MiB there; Docker's containers have 64 MiB."""


def memory_folder() -> Path | None:
    """Make a folder in memory for temporary files. None without room, or where no programs may run.

    Its path is short, because sockets have paths of at most 107 bytes.
    """
    try:
        system = os.statvfs(MEMORY)
        if system.f_bavail * system.f_frsize < MEMORY_BYTES or system.f_flag & os.ST_NOEXEC:
            return None
        folder = Path(tempfile.mkdtemp(prefix="t-", dir=MEMORY))
    except OSError:
        return None
    folder.chmod(0o755)
    return folder


@contextmanager
def failing_disk(folder: Path, mib: int = 32) -> Generator[Callable[[], None]]:
    """Mount a file system at a folder; the function lets the kernel find an error in it.

    Then nothing can be written there any more, also into files that are open (EROFS). The test is skipped
    where that is not allowed.
    """
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    # Without a journal, so that the kernel has nothing to say about it.
    make = ["mkfs.ext4", "-q", "-O", "^has_journal", str(image)]
    mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]
    if os.geteuid() != 0 or any(
        subprocess.run(command, capture_output=True, check=False).returncode != 0 for command in (make, mount)
    ):
        pytest.skip("mounting a file system requires root and a loop device")
    source = subprocess.check_output(["findmnt", "-no", "SOURCE", str(folder)], text=True).strip()

    def fail() -> None:
        Path(f"/sys/fs/ext4/{Path(source).name}/trigger_fs_error").write_text("test\n")

    try:
        yield fail
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_blocks(filler: Path) -> None:
    """Leave not a single block free, with a file of this name. Takes no time where blocks are allocated."""
    with filler.open("wb", buffering=0) as file:
        for size_bytes in (64 << 20, 1 << 20, 4096):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size_bytes)
        with suppress(OSError):
            while file.write(bytes(512)):
                pass


@contextmanager
def small_disk(folder: Path, mib: int, *, inodes: int = 10_000) -> Generator[Path]:
    """Mount a file system in memory at a folder; the test is skipped where that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,nr_inodes={inodes}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system requires root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
