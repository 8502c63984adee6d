"""Unpacking and packing of small archives that travel over the connection: members as JSON, bodies as base64.

A path is sent as its bytes, each as the character of that number (latin-1), so that any name survives JSON.
"""

from __future__ import annotations

import binascii
import os
import stat

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from decathlon_sandbox.rpc import Params

    Parts = tuple[bytes, ...]

FILE, FOLDER, SYMLINK, HARD_LINK = "file", "folder", "symlink", "hard_link"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# The file may be replaced while it is looked at: no link is followed, and no writer of a FIFO waited for.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MEMBER_BYTES = 512
"""What a member counts besides its body, as in a tar archive."""


class _Member:
    """A member of an archive. `data` is the body of a file or the target of a link."""

    __slots__ = ("data", "kind", "mode", "mtime", "parts")

    def __init__(self, parts: Parts, kind: str, mode: int, mtime: int, data: bytes) -> None:
        self.parts = parts
        self.kind = kind
        self.mode = mode
        self.mtime = mtime
        self.data = data


def parse_members(step: Params) -> list[_Member]:
    """The members of an `unpack` step. Raises RequestError."""
    try:
        bodies = binascii.a2b_base64(step.string("data"))
    except ValueError:
        raise RequestError(wire.BAD_PARAMS, "`data` must be base64") from None
    members: list[_Member] = []
    offset = 0
    for member in step.objects("members"):
        kind = member.one_of("kind", FILE, FOLDER, SYMLINK, HARD_LINK)
        data = b""
        if kind == FILE:
            size = member.integer("size", maximum=len(bodies) - offset)
            data = bodies[offset : offset + size]
            offset += size
        elif kind != FOLDER:
            data = _path_bytes(member, "link")
        mode = member.integer("mode", maximum=0o777)
        mtime = member.integer("mtime", maximum=1 << 33)
        members.append(_Member(_parts(_path_bytes(member, "name")), kind, mode, mtime, data))
    return members


def _path_bytes(member: Params, name: str) -> bytes:
    try:
        return member.string(name).encode("latin-1")
    except UnicodeEncodeError:
        raise RequestError(wire.BAD_PARAMS, f"`{name}` must have one character for each byte") from None


def _parts(name: bytes) -> Parts:
    """The parts of a relative path. Raises RequestError for one that could lead out."""
    parts = tuple(name.split(b"/"))
    if any(part in (b"", b".", b"..") for part in parts):
        raise RequestError(wire.BAD_PARAMS, "a member's name must be relative and normalized")
    return parts


def unpack(folder: str, members: list[_Member], check_cancelled: Callable[[], None]) -> None:
    """Unpack into `folder`, created if missing, never writing through a link below it. Raises OSError.

    Files and links replace those of the same names. Everything belongs to the driver's user.
    """
    os.makedirs(folder, exist_ok=True)
    folders: dict[Parts, _Member] = {}
    with FolderCursor(folder) as cursor:
        for member in members:
            check_cancelled()
            _unpack(member, cursor)
            if member.kind == FOLDER:
                folders[member.parts] = member
        # Last, and the deepest first: a folder's mode may forbid to change what is in it, and every change
        # in it sets its time.
        for parts in sorted(folders, key=len, reverse=True):
            fd = cursor.enter(parts)
            os.fchmod(fd, folders[parts].mode)
            os.utime(fd, (folders[parts].mtime, folders[parts].mtime))


def _unpack(member: _Member, cursor: FolderCursor) -> None:
    name = member.parts[-1]
    if member.kind == FOLDER:
        os.fchmod(cursor.enter(member.parts), member.mode | 0o700)
        return
    parent = cursor.enter(member.parts[:-1])
    times = (member.mtime, member.mtime)
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    if member.kind == SYMLINK:
        os.symlink(member.data, name, dir_fd=parent)
        os.utime(name, times, dir_fd=parent, follow_symlinks=False)
    elif member.kind == HARD_LINK:
        _link(_parts(member.data), member.parts, cursor)
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


class TooLargeError(Exception):
    """The archive is larger than it may be."""


def pack(folder: str, max_bytes: int) -> dict[str, Any]:
    """The members of `folder`, depth first, names sorted. A missing folder has none.

    Raises TooLargeError, and OSError or ValueError for what cannot be packed.
    """
    members: list[dict[str, Any]] = []
    bodies: list[bytes] = []
    remaining = max_bytes
    for name, path in _walk(os.fsencode(folder)):
        status = os.lstat(path)
        member: dict[str, Any] = {
            "name": name.decode("latin-1"),
            "mode": stat.S_IMODE(status.st_mode) & 0o777,
            "mtime": max(0, int(status.st_mtime)),
        }
        if stat.S_ISDIR(status.st_mode):
            member["kind"] = FOLDER
        elif stat.S_ISLNK(status.st_mode):
            member |= {"kind": SYMLINK, "link": os.readlink(path).decode("latin-1")}
        elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            body = _read(path, remaining)
            member |= {"kind": FILE, "size": len(body)}
            bodies.append(body)
            remaining -= len(body)
        else:
            raise ValueError(f"{os.fsdecode(path)!r} is neither file, folder nor link, or has several names")
        remaining -= MEMBER_BYTES
        if remaining < 0:
            raise TooLargeError
        members.append(member)
    return {"members": members, "data": binascii.b2a_base64(b"".join(bodies), newline=False).decode()}


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


def _read(path: bytes, max_bytes: int) -> bytes:
    with open(os.open(path, _OPEN_FLAGS), "rb") as file:
        body = file.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise TooLargeError
    return body
