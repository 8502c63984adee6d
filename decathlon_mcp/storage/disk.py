"""Free space in the state folder: below a floor, no episode starts and large logs end."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO

from decathlon_mcp.errors import AtCapacityError

RETRY_SECONDS = 60.0
"""When to ask again after a refusal: running episodes must end first."""
SMALL_BYTES = 1 << 20
"""Logs up to this length are written also while the disk is nearly full."""
KERNEL_FILE_BYTES = 16 << 20
"""Limit on a file of /proc or /sys. A table of 100,000 mounts, as many as the kernel allows, has that."""
SMALL_ARCHIVE_BYTES = 16 << 20
"""An archive of this length is written however little is free."""


_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a file that somebody can repair while a server runs, after which the same step succeeds."""


REPAIR_OR_LEAVE = (
    "free space and inodes on its disk, and let it be written, or choose another folder, without the "
    "episodes of this one"
)


def cure_of(error: OSError) -> str:
    """What to do about an error of the state folder."""
    return REPAIR_OR_LEAVE if is_full(error) else "choose another folder"


def is_full(error: Exception) -> bool:
    """Whether an error says that nothing can be written for now.

    The disk, or a user's quota of it, has no room or no inode, it is read-only, or the server has no
    descriptor left.
    """
    return isinstance(error, OSError) and error.errno in _PASSING


def can_create_in(folder: Path) -> bool:
    """Whether this process can create something in a folder. Tries it, and leaves nothing. Blocks."""
    # By `access` root may do everything, also in /proc, where nothing can be created.
    try:
        with tempfile.TemporaryDirectory(prefix=".decathlon-", dir=folder):
            return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system of a folder, of which `floor_bytes` are left for the episodes that already run."""

    folder: Path
    floor_bytes: int

    def free_bytes(self) -> int:
        """Bytes that this process may still write. Raises OSError."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def is_low(self) -> bool:
        """Whether less than the floor is free; false if that cannot be found out."""
        try:
            return self.free_bytes() < self.floor_bytes
        except OSError:
            return False

    def why_unwritable(self) -> str | None:
        """Why no file can be written now; None if one can. Writes one of a byte, and removes it."""
        file = self.folder / f".writable-{os.getpid()}"
        try:
            try:
                with create_private(file) as trial:
                    trial.write(b"1")
            finally:
                file.unlink(missing_ok=True)
        except OSError as error:
            return error.strerror
        return None

    def limit_archive(self, limit_bytes: int) -> int:
        """The largest archive that a running episode may write now, at most `limit_bytes`.

        Half of the floor stays free, for the verdicts of other episodes; grading writes a second copy.
        """
        try:
            free_bytes = self.free_bytes()
        except OSError:
            return limit_bytes
        small_bytes = min(SMALL_ARCHIVE_BYTES, free_bytes)
        return min(limit_bytes, max(small_bytes, (free_bytes - self.floor_bytes // 2) // 2))

    def guard(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Pass on the chunks of a file; AtCapacityError past SMALL_BYTES while the disk is nearly full."""
        written_bytes = 0
        for chunk in chunks:
            written_bytes += len(chunk)
            if written_bytes > SMALL_BYTES and self.is_low():
                raise AtCapacityError("the server's disk is nearly full: there is no room for a large log")
            yield chunk

    def refuse_if_low(self) -> None:
        """Raise AtCapacityError if less than the floor is free."""
        if self.is_low():
            raise AtCapacityError(
                f"the server's disk is nearly full: less than {self.floor_bytes >> 20} MiB are free; "
                f"ask again in {RETRY_SECONDS:.0f} s",
                retryAfterSeconds=RETRY_SECONDS,
            )


@contextmanager
def new_file(file: Path, unfinished: Path) -> Generator[BinaryIO]:
    """A file that is called `unfinished` until the end of the body, and then replaces `file`.

    Only its owner may read it. After an error there is no `unfinished`, and `file` is as it was.
    """
    try:
        with create_private(unfinished) as out:
            yield out
        os.replace(unfinished, file)  # noqa: PTH105  (documented as atomic)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class NotRegularError(OSError):
    """There is a link, a FIFO, a folder or a device in the place of a file."""


def open_regular(file: Path, *, follow: bool = False) -> BufferedReader:
    """Open a file of a state folder to read it. Raises NotRegularError, OSError.

    The folder may come from somewhere else: a link could lead out of it (`follow` allows that), and to open a
    FIFO would wait for ever.
    """
    return open(_open_regular(file, os.O_RDONLY, follow=follow), "rb")


def read_kernel_file(file: Path) -> str:
    """The text of a file of the kernel. Raises OSError, also if it has more than `KERNEL_FILE_BYTES`."""
    with open(_open_regular(file, os.O_RDONLY, follow=True), "rb") as content:
        text = content.read(KERNEL_FILE_BYTES + 1)
    if len(text) > KERNEL_FILE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return text.decode("utf-8", "replace")


def append_to_regular(file: Path, *, create: bool = False) -> FileIO:
    """Open a file of a state folder to append to it, unbuffered. Raises the same.

    `create`: a new file; FileExistsError if there is one. Otherwise it must exist.
    """
    flags = os.O_CREAT | os.O_EXCL if create else 0
    return FileIO(_open_regular(file, os.O_WRONLY | os.O_APPEND | flags, follow=False), "ab")


def _open_regular(file: Path, flags: int, *, follow: bool) -> int:
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_regular(file) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(file)
    return descriptor


def _not_regular(file: Path) -> NotRegularError:
    return NotRegularError(errno.EINVAL, "it is not a regular file", str(file))


def create_private(file: Path) -> BinaryIO:
    """A file for its owner only, which is created or emptied. Raises OSError, also for a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(file, flags, 0o600), "wb")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data: on a disk that becomes full, a write may stop in its middle without an error."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]
