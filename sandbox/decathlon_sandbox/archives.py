"""Small archives that travel over the connection: tar, in base64.

`tarfile` only reads headers and makes them. Members are written here: `extractall` follows the links that an
archive creates, and filters that prevent it are missing from many a Python of 3.10 and 3.11.
"""

from __future__ import annotations

import binascii
import io
import os
import stat
import tarfile

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Parts = tuple[bytes, ...]

MAX_DEPTH = 1_000
"""How many folders a member may lie in."""
MAX_NAME_BYTES = 8 << 10
"""Longest header of a long name; paths on Linux have at most 4,096 bytes."""
MAX_MTIME = 1 << 33
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# The file may be replaced while it is looked at: no link is followed, and no writer of a FIFO waited for.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MEMBERS = (*_FILES, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
_END = bytes(2 * tarfile.BLOCKSIZE)
# Gives each byte of a name as the character of that number, so that any name survives.
_ENCODING = "latin-1"


class _BrokenError(Exception):
    """The archive is no whole tar, or has a member that is never unpacked."""


class _Header(tarfile.TarInfo):
    """A header of a kind that is unpacked. Others are refused before `tarfile` acts on what they say.

    It would search extended headers of any size by regular expressions, allocate what sparse files claim to
    have, and seek by negative sizes, in some versions forever.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.type not in _MEMBERS and header.type not in _LONG_NAMES:
            raise _BrokenError(f"{header.name[:200]!r} is no file, folder or link")
        if not 0 <= header.size <= (MAX_NAME_BYTES if header.type in _LONG_NAMES else wire.MAX_ARCHIVE_BYTES):
            raise _BrokenError(f"the size of {header.name[:200]!r} is {header.size}")
        if not 0 <= header.mtime <= MAX_MTIME:
            raise _BrokenError(f"the time of {header.name[:200]!r} is {header.mtime}")
        return header


class _Member:
    """A member of an archive. `data` is the body of a file or the target of a link."""

    __slots__ = ("data", "mode", "mtime", "parts", "type")

    def __init__(self, header: tarfile.TarInfo, archive: memoryview) -> None:
        self.type = header.type
        self.mode = header.mode & 0o777
        self.mtime = header.mtime
        self.parts = _parts(header.name.rstrip("/").encode(_ENCODING))
        self.data: bytes | memoryview = header.linkname.encode(_ENCODING)
        if self.type in _FILES:
            self.data = archive[header.offset_data : header.offset_data + header.size]
            if len(self.data) < header.size:
                raise _BrokenError("it ends within a member")
        elif self.type == tarfile.LNKTYPE:
            _parts(bytes(self.data))


def _read(archive: bytes) -> list[_Member]:
    """All members of an archive, at most one for each 512 bytes. Raises RequestError."""
    if len(archive) > wire.MAX_ARCHIVE_BYTES:
        raise RequestError(wire.BAD_PARAMS, f"an archive has at most {wire.MAX_ARCHIVE_BYTES} bytes")
    try:
        with tarfile.TarFile(fileobj=io.BytesIO(archive), tarinfo=_Header, encoding=_ENCODING) as tar:
            view = memoryview(archive)
            members = [_Member(header, view) for header in tar]
            _check_end(archive, tar.offset)
    except RecursionError:
        raise RequestError(wire.BAD_PARAMS, "the archive has too many extended headers") from None
    except (_BrokenError, tarfile.TarError, ValueError) as error:
        raise RequestError(wire.BAD_PARAMS, f"no archive that can be unpacked: {error}") from None
    return members


def _check_end(archive: bytes, offset: int) -> None:
    # A broken header in the middle is the end for `tarfile`.
    end = archive[offset:]
    if not end.startswith(_END) or end.strip(b"\0"):
        raise _BrokenError(f"there is no valid header at byte {offset}")


def _parts(name: bytes) -> Parts:
    """The parts of a relative path. Raises _BrokenError for one that could lead out."""
    parts = tuple(name.split(b"/"))
    if len(parts) > MAX_DEPTH or any(part in (b"", b".", b"..") for part in parts):
        raise _BrokenError(f"the name {name[:200]!r} is not relative and normalized, or too deep")
    return parts


def decode(text: str) -> bytes:
    """The bytes of an archive in a request. Raises RequestError."""
    try:
        return binascii.a2b_base64(text)
    except ValueError:
        raise RequestError(wire.BAD_PARAMS, "`tar` must be base64") from None


def unpack(folder: str, archive: bytes, check_cancelled: Callable[[], None]) -> None:
    """Unpack into `folder`, created if missing, never writing through a link below it.

    Files and links replace those of the same names. Everything belongs to the driver's user. Raises OSError,
    and RequestError for an archive that cannot be unpacked; nothing of it is written then.
    """
    members = _read(archive)
    os.makedirs(folder, exist_ok=True)
    folders: dict[Parts, _Member] = {}
    with FolderCursor(folder) as cursor:
        for member in members:
            check_cancelled()
            _unpack(member, cursor)
            if member.type == tarfile.DIRTYPE:
                folders[member.parts] = member
        # Last, and the deepest first: a folder's mode may forbid to change what is in it, and every change
        # in it sets its time.
        for parts in sorted(folders, key=len, reverse=True):
            fd = cursor.enter(parts)
            os.fchmod(fd, folders[parts].mode)
            os.utime(fd, (folders[parts].mtime, folders[parts].mtime))


def _unpack(member: _Member, cursor: FolderCursor) -> None:
    name = member.parts[-1]
    if member.type == tarfile.DIRTYPE:
        os.fchmod(cursor.enter(member.parts), member.mode | 0o700)
        return
    parent = cursor.enter(member.parts[:-1])
    times = (member.mtime, member.mtime)
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    if member.type == tarfile.SYMTYPE:
        os.symlink(bytes(member.data), name, dir_fd=parent)
        os.utime(name, times, dir_fd=parent, follow_symlinks=False)
    elif member.type == tarfile.LNKTYPE:
        _link(_parts(bytes(member.data)), member.parts, cursor)
    else:
        with open(os.open(name, _NEW_FILE_FLAGS, 0o600, dir_fd=parent), "wb", buffering=0) as file:
            view = memoryview(member.data)
            while view:
                view = view[file.write(view) :]
            os.fchmod(file.fileno(), member.mode)
            os.utime(file.fileno(), times)


def _link(target: Parts, link: Parts, cursor: FolderCursor) -> None:
    source = os.dup(cursor.enter(target[:-1]))  # the cursor's own is valid until it moves on
    try:
        parent = cursor.enter(link[:-1])
        os.link(target[-1], link[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(source)


class FolderCursor:
    """Moves through the folders below `base` by descriptors, so that no link on the path is followed."""

    def __init__(self, base: str) -> None:
        # A link to a folder is followed, as by the engines' own archives.
        self._base = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._parts: Parts = ()
        self._current = os.dup(self._base)

    def __enter__(self) -> FolderCursor:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._current)
        os.close(self._base)

    def enter(self, parts: Parts) -> int:
        """A descriptor of that folder, created if missing; valid until the next call."""
        if parts != self._parts:
            current = os.dup(self._base)
            try:
                for part in parts:
                    child = _open_child(current, part)
                    os.close(current)
                    current = child
            except OSError:
                os.close(current)
                raise
            os.close(self._current)
            self._current, self._parts = current, parts
        return self._current


def _open_child(parent: int, name: bytes) -> int:
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=parent)
        return os.open(name, _FOLDER_FLAGS, dir_fd=parent)


def pack(folder: str, max_bytes: int) -> str:
    """The tar of what is in `folder`, in base64: depth first, names sorted. A missing folder has no members.

    Raises RequestError (TOO_LONG) if it would be longer, and OSError or ValueError for what cannot be packed.
    """
    too_large = RequestError(wire.TOO_LONG, f"the files below {folder} are larger than {max_bytes} bytes")
    blocks: list[bytes] = []
    remaining = max_bytes - len(_END)
    for name, path in _walk(os.fsencode(folder)):
        status = os.lstat(path)
        header = tarfile.TarInfo(name.decode(_ENCODING))
        header.mode = stat.S_IMODE(status.st_mode) & 0o777
        header.mtime = max(0, int(status.st_mtime))
        body = b""
        if stat.S_ISDIR(status.st_mode):
            header.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(status.st_mode):
            header.type, header.linkname = tarfile.SYMTYPE, os.readlink(path).decode(_ENCODING)
        elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            with open(os.open(path, _OPEN_FLAGS), "rb") as file:
                body = file.read(max(0, remaining) + 1)
            header.size = len(body)
        else:
            raise ValueError(f"{os.fsdecode(path)!r} is neither file, folder nor link, or has several names")
        member = header.tobuf(tarfile.GNU_FORMAT, _ENCODING), body, bytes(-len(body) % tarfile.BLOCKSIZE)
        remaining -= sum(map(len, member))
        if remaining < 0:
            raise too_large
        blocks += member
    return binascii.b2a_base64(b"".join((*blocks, _END)), newline=False).decode()


def _walk(top: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Relative name and path of everything below `top`; links are not followed."""
    if not os.path.isdir(top):
        return
    pending = [b""]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(top, folder)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name = os.path.join(folder, entry.name)
            yield name, entry.path
            if entry.is_dir(follow_symlinks=False):
                pending.append(name)
