"""Small archives that travel over the connection: tar, in base64.

Without `tarfile`: its import takes longer than an archive and comes from a file system that an agent may have
changed. What is unpacked was checked by the server, which could also run any command here. What was packed
is checked by the server, as every archive of a sandbox is.
"""

from __future__ import annotations

import binascii
import os
import stat
from collections.abc import Iterator

from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

Parts = tuple[bytes, ...]

MAX_MTIME = (1 << 33) - 1
"""Latest time that a header has room for."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# The file may be replaced while it is looked at: no link is followed, and no writer of a FIFO waited for.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BLOCK_BYTES = 512
_END = bytes(2 * _BLOCK_BYTES)
_MAX_FIELD = 100
"""Longest name in an ordinary header."""
# GNU's magic, and no names of user and group, device or prefix.
_TAIL = b"ustar  \0".ljust(_BLOCK_BYTES - 257, b"\0")
_TAIL_SUM = sum(_TAIL) + 8 * 0x20
# POSIX.1-2017 pax, "ustar Interchange Format": the kinds of members, and GNU's two for long names.
_FILE, _HARD_LINK, _SYMLINK, _FOLDER, _LONG_NAME, _LONG_LINK = b"0", b"1", b"2", b"5", b"L", b"K"


class _Member:
    """A member of an archive. `data` is the body of a file or the target of a link."""

    __slots__ = ("data", "kind", "mode", "mtime", "parts")

    def __init__(self, kind: bytes, name: bytes, header: bytes, data: bytes | memoryview) -> None:
        self.kind = kind
        self.parts = _parts(name.rstrip(b"/"))
        self.mode = _number(header[100:108]) & 0o777
        self.mtime = _number(header[136:148])
        self.data = data


def _read(archive: bytes) -> list[_Member]:
    """All members of an archive, which the server has checked: `header` has made its headers."""
    members: list[_Member] = []
    long: dict[bytes, bytes] = {}
    view, offset = memoryview(archive), 0
    while not archive.startswith(_END, offset):
        header, kind = archive[offset : offset + _BLOCK_BYTES], archive[offset + 156 : offset + 157]
        size = _number(header[124:136])
        offset += _BLOCK_BYTES
        body = view[offset : offset + size]
        offset += size + -size % _BLOCK_BYTES
        if kind in (_LONG_NAME, _LONG_LINK):
            long[kind] = _text(bytes(body))
            continue
        name = long.pop(_LONG_NAME, None) or _text(header[:100])
        link = long.pop(_LONG_LINK, None) or _text(header[157:257])
        members.append(_Member(kind, name, header, link if kind in (_HARD_LINK, _SYMLINK) else body))
    return members


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    """A number in octal digits. Raises ValueError for any other."""
    return int(_text(field), 8)


def _parts(name: bytes) -> Parts:
    """The parts of a relative path. Raises ValueError for a path that could lead out."""
    parts = tuple(name.split(b"/"))
    if any(part in (b"", b".", b"..") for part in parts):
        raise ValueError(f"the name {name[:200]!r} is not relative and normalized")
    return parts


def unpack(folder: str, tar: str) -> None:
    """Unpack into `folder`, created if missing, never writing through a link below it.

    Files and links replace existing files and links. Everything belongs to the driver's user. Raises OSError,
    and ValueError for what is no archive of the server's.
    """
    members = _read(binascii.a2b_base64(tar))
    os.makedirs(folder, exist_ok=True)
    folders: dict[Parts, _Member] = {}
    # A link to a folder is followed, as by the engines' own archives.
    with FolderCursor(os.path.realpath(folder), creates=True) as cursor:
        for member in members:
            _unpack(member, cursor)
            if member.kind == _FOLDER:
                folders[member.parts] = member
        # Last, and the deepest first: a folder's mode may forbid to change what is in it, and every change
        # in it sets its time.
        for parts in sorted(folders, key=len, reverse=True):
            fd = cursor.enter(parts)
            os.fchmod(fd, folders[parts].mode)
            os.utime(fd, (folders[parts].mtime, folders[parts].mtime))


def _unpack(member: _Member, cursor: FolderCursor) -> None:
    name = member.parts[-1]
    if member.kind == _FOLDER:
        os.fchmod(cursor.enter(member.parts), member.mode | 0o700)
        return
    parent = cursor.enter(member.parts[:-1])
    times = (member.mtime, member.mtime)
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    if member.kind == _SYMLINK:
        os.symlink(bytes(member.data), name, dir_fd=parent)
        os.utime(name, times, dir_fd=parent, follow_symlinks=False)
    elif member.kind == _HARD_LINK:
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
    """Moves through the folders below `base` by descriptors, so that no link on the way is followed.

    `base`: the path or a descriptor of a folder. `creates`: whether folders that are missing are created. The
    server uses it too.
    """

    def __init__(self, base: str | os.PathLike[str] | int, *, creates: bool = False) -> None:
        self._creates = creates
        if isinstance(base, int):
            self._base = os.open(".", _FOLDER_FLAGS, dir_fd=base)
        else:
            self._base = os.open(base, _FOLDER_FLAGS)
        self._parts: tuple[str | bytes, ...] = ()
        self._current = os.dup(self._base)
        self._identities: list[tuple[int, int]] = []
        """Device and inode of each folder of `_parts`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._current)
        os.close(self._base)

    def enter(self, parts: tuple[str | bytes, ...]) -> int:
        """A descriptor of that folder, valid until the next call.

        Raises OSError, e.g. for a link, and ValueError for "..".
        """
        level = 0
        for part, other in zip(parts, self._parts, strict=False):
            if part != other:
                break
            level += 1
        if level < len(self._parts):
            above = self._above(level)
            level, above = (0, os.dup(self._base)) if above is None else (level, above)
            os.close(self._current)
            self._current, self._parts = above, parts[:level]
            del self._identities[level:]
        for part in parts[level:]:
            self._descend(part)
        return self._current

    def _above(self, level: int) -> int | None:
        """A descriptor of the folder of that level above the current; None if `..` does not lead there."""
        if level == 0:
            return None
        try:
            way = "/".join([".."] * (len(self._parts) - level))
            folder = os.open(way, _FOLDER_FLAGS, dir_fd=self._current)
        except OSError:
            return None
        # It leads elsewhere if a folder was moved meanwhile.
        if _identity(folder) == self._identities[level - 1]:
            return folder
        os.close(folder)
        return None

    def _descend(self, part: str | bytes) -> None:
        if os.fsencode(part) in (b"", b".", b".."):
            raise ValueError(f"{part!r} is no name of a folder")
        child = self._open(part)
        os.close(self._current)
        self._current, self._parts = child, (*self._parts, part)
        self._identities.append(_identity(child))

    def _open(self, name: str | bytes) -> int:
        try:
            return open_accessible(name, _FOLDER_FLAGS, self._current, 0o700)
        except FileNotFoundError:
            if not self._creates:
                raise
            os.mkdir(name, 0o755, dir_fd=self._current)
            return os.open(name, _FOLDER_FLAGS, dir_fd=self._current)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def open_accessible(name: str | bytes, flags: int, folder: int, mode: int) -> int:
    """Open a file in a folder without following a link.

    Its owner may have taken the permission from itself: then it gets the permissions `mode` first. Raises
    OSError.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            # chmod(2) would follow a link that has replaced it, and fchmod(2) refuses such a descriptor.
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        finally:
            os.close(descriptor)
        return os.open(name, flags, dir_fd=folder)


def pack(folder: str, max_bytes: int) -> str:
    """The tar of what is in `folder`, in base64: depth first, names sorted. A missing folder has no members.

    Raises RequestError (TOO_LONG) if it would be longer, and OSError or ValueError for what cannot be packed.
    """
    too_large = RequestError(wire.TOO_LONG, f"the files below {folder} are larger than {max_bytes} bytes")
    blocks: list[bytes] = []
    remaining = max_bytes - len(_END)
    for name, path in _walk(os.fsencode(folder)):
        status = os.lstat(path)
        link, body = b"", b""
        if stat.S_ISDIR(status.st_mode):
            kind = _FOLDER
        elif stat.S_ISLNK(status.st_mode):
            kind, link = _SYMLINK, os.readlink(path)
        elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            kind = _FILE
            with open(os.open(path, _OPEN_FLAGS), "rb") as file:
                body = file.read(max(0, remaining) + 1)
        else:
            raise ValueError(f"{os.fsdecode(path)!r} is neither file, folder nor link, or has several names")
        mode, mtime = status.st_mode & 0o777, int(status.st_mtime)
        member = header(name, kind, len(body), link, mode, mtime), body, _padding(body)
        remaining -= sum(map(len, member))
        if remaining < 0:
            raise too_large
        blocks += member
    return binascii.b2a_base64(b"".join((*blocks, _END)), newline=False).decode()


def header(
    name: bytes,
    kind: bytes,
    size: int,
    link: bytes = b"",
    mode: int = 0,
    mtime: int = 0,
    user: int = 0,
    group: int = 0,
) -> bytes:
    """A member's header as `tarfile` writes it in GNU's format, which takes names of any bytes and length.

    The extended headers of a long name and a long link come first. The server uses it too.
    """
    start = b"%b%07o\0%b%b%b%011o\0" % (
        name[:_MAX_FIELD].ljust(_MAX_FIELD, b"\0"),
        mode,
        _field(user, 8),
        _field(group, 8),
        _field(size, 12),
        min(max(0, mtime), MAX_MTIME),
    )
    end = kind + link[:_MAX_FIELD].ljust(_MAX_FIELD, b"\0")
    block = b"%b%06o\0 %b%b" % (start, sum(start) + sum(end) + _TAIL_SUM, end, _TAIL)
    if len(name) > _MAX_FIELD:
        block = _long(_LONG_NAME, name) + block
    return _long(_LONG_LINK, link) + block if len(link) > _MAX_FIELD else block


def _long(kind: bytes, name: bytes) -> bytes:
    """The extended header for a name that is too long for an ordinary header."""
    return header(b"././@LongLink", kind, len(name) + 1) + name + b"\0" + _padding(name + b"\0")


def _field(value: int, length: int) -> bytes:
    """Octal digits, or base 256 for a number that has too many (GNU)."""
    if value < 8 ** (length - 1):
        return b"%0*o\0" % (length - 1, value)
    return b"\x80" + value.to_bytes(length - 1, "big")


def _padding(body: bytes) -> bytes:
    return bytes(-len(body) % _BLOCK_BYTES)


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
