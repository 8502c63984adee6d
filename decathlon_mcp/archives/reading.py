"""Reads tar archives from untrusted sources: headers as a stream, in constant memory.

Understands ustar, GNU long names and the pax fields that describe a member (POSIX.1-2017 `pax`, "ustar
Interchange Format"). Global pax headers are ignored.
"""

# Why not `tarfile`: it reads extended headers of any size into memory, expands sparse files (a few bytes of
# archive become terabytes), and takes a broken header in the middle for the end of the archive.

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

BLOCK_BYTES = 512
CHUNK_BYTES = 1 << 18
"""Size of the pieces in which bodies are read and written."""
MAX_EXTENDED_BYTES = 1 << 14
"""Largest extended header that is read. Paths on Linux have at most 4,096 bytes."""
MAX_EXTENDED_FIELDS = 64
MAX_EXTENDED_HEADERS = 8
"""Extended headers allowed before one member."""

_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENSIONS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_FIELDS = Struct("100s 8s 8s 8s 12s 12s 8x c 100s 6s 82x 155s 12x")
"""Of a header: name, mode, user, group, size, mtime, kind, link, magic, prefix."""
_ADLER_MODULUS = 65_521
_SPARSE = ord("S")


class BrokenArchiveError(ValueError):
    """The archive is cut short or is no tar; the message gives the position."""


class Kind(Enum):
    """Type of a member; the value is its type flag in the header."""

    FILE = b"0"
    HARD_LINK = b"1"
    SYMLINK = b"2"
    CHARACTER_DEVICE = b"3"
    BLOCK_DEVICE = b"4"
    FOLDER = b"5"
    FIFO = b"6"
    SPARSE_FILE = b"S"
    UNKNOWN = b"?"


_KINDS = {kind.value: kind for kind in Kind}
_WITHOUT_BODY = frozenset(
    {Kind.HARD_LINK, Kind.SYMLINK, Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE, Kind.FOLDER, Kind.FIFO}
)


# A struct is made in a tenth of a dataclass's time, and an agent's workspace may have 250,000 members.
class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Header of one member."""

    name: str
    """UTF-8, like `link`; other bytes are surrogate escapes."""
    kind: Kind
    size: int = 0
    """Length of the body in bytes."""
    mode: int = 0o644
    mtime: int = 0
    """Whole seconds since 1970."""
    link: str = ""
    user: int = 0
    group: int = 0
    name_unreadable: bool = False
    """Whether an extended header is above the limits, so that `name` and `link` are unknown."""


Body = Iterable[bytes]


class ArchiveReader:
    """Iterates over the members of a tar. `body` reads the member that was yielded last.

    `file` is only ever read forwards (except by `head`), so a decompressing file works too. `size_bytes` is
    the length of the archive, None where it is not known. Both iterating and `body` raise
    BrokenArchiveError. With a known length, a member whose body is cut short is never yielded.
    """

    def __init__(self, file: BinaryIO, size_bytes: int | None) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._body_start = 0
        self._body_bytes = 0
        self.end = 0
        """Offset behind the last member that was read."""

    @classmethod
    def of_file(cls, file: BinaryIO) -> ArchiveReader:
        """A reader of a plain tar in a seekable file."""
        return cls(file, file.seek(0, 2))

    def __iter__(self) -> Iterator[Member]:
        return iter(self._next, None)

    def head(self, size: int) -> bytes:
        """The first bytes of the current member's body, which needs a seekable file to be read afterwards."""
        self._seek(self._body_start)
        return self._read(min(size, self._body_bytes))

    def body(self) -> Iterator[bytes]:
        """The body of the current member, in chunks."""
        self._seek(self._body_start)
        remaining = self._body_bytes
        while remaining:
            chunk = self._read(min(remaining, CHUNK_BYTES))
            if not chunk:
                raise BrokenArchiveError(f"the archive ends within the member at byte {self._body_start}")
            remaining -= len(chunk)
            yield chunk

    def _next(self) -> Member | None:
        extended: dict[bytes, bytes] = {}
        too_large = False
        offset = self.end
        for _ in range(MAX_EXTENDED_HEADERS + 1):
            block = self._block(offset)
            if block is None:
                return None
            flag = block[156:157]
            if flag not in _EXTENSIONS:
                return self._member(block, offset, extended, too_large)
            size = _number(block[124:136])
            body = offset + BLOCK_BYTES
            self._check_end(offset, body + size)
            if size > MAX_EXTENDED_BYTES:
                too_large = True
            elif flag != _PAX_GLOBAL:
                extended |= _extension(flag, self._read_all(size))
            offset = body + size + -size % BLOCK_BYTES
        raise BrokenArchiveError(f"too many extended headers at byte {offset}")

    def _member(self, block: bytes, offset: int, extended: Mapping[bytes, bytes], too_large: bool) -> Member:
        body = offset + BLOCK_BYTES
        member = _parse(block, extended, name_unreadable=too_large)
        if block[156] == _SPARSE:
            body = self._end_of_sparse_map(block, body)
        self._body_start = body
        self._body_bytes = 0 if member.kind in _WITHOUT_BODY else member.size
        self._check_end(offset, body + self._body_bytes)
        self.end = body + self._body_bytes + -self._body_bytes % BLOCK_BYTES
        return member

    def _block(self, offset: int) -> bytes | None:
        """The header at an offset; None at the end of the archive."""
        if self._size_bytes is not None and offset >= self._size_bytes:
            return None
        self._seek(offset)
        block = self._read(BLOCK_BYTES)
        if block in (b"", _ZERO_BLOCK):
            return None
        if len(block) < BLOCK_BYTES:
            raise BrokenArchiveError(f"the archive ends within a header at byte {offset}")
        # The checksum counts its own eight bytes as spaces. The lower half of Adler-32 is one more than the
        # sum of all bytes; it takes a tenth of the time, and the modulus tells headers from other bytes.
        bytes_sum = (zlib.adler32(block) & 0xFFFF) - 1 - sum(block[148:156]) + 8 * 0x20
        if (_number(block[148:156]) - bytes_sum) % _ADLER_MODULUS:
            raise BrokenArchiveError(f"there is no valid header at byte {offset}")
        return block

    def _end_of_sparse_map(self, header: bytes, offset: int) -> int:
        """Skip the blocks with which GNU's old sparse format continues its map before the body."""
        continued = header[482]
        while continued:
            self._seek(offset)
            block = self._read(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES:
                raise BrokenArchiveError(f"the archive ends within a sparse map at byte {offset}")
            continued, offset = block[504], offset + BLOCK_BYTES
        return offset

    def _check_end(self, offset: int, end: int) -> None:
        if self._size_bytes is not None and end > self._size_bytes:
            raise BrokenArchiveError(f"the archive ends within the member at byte {offset}")

    def _seek(self, offset: int) -> None:
        try:
            reached = self._file.seek(offset)
        except (EOFError, OSError, zlib.error) as error:
            raise BrokenArchiveError(str(error)) from error
        if reached != offset:
            raise BrokenArchiveError(f"the archive ends at byte {reached}, within a member")

    def _read_all(self, size: int) -> bytes:
        data = self._read(size)
        if len(data) < size:
            raise BrokenArchiveError("the archive ends within an extended header")
        return data

    def _read(self, size: int) -> bytes:
        # A decompressing file raises these for input that is cut short or is not compressed as it claims.
        try:
            return self._file.read(size)
        except (EOFError, OSError, zlib.error) as error:
            raise BrokenArchiveError(str(error)) from error


class ForwardFile:
    """A file that arrives in chunks: it can be read, and sought forwards. For `ArchiveReader`."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._buffer = bytearray()
        self._position = 0

    def seek(self, offset: int) -> int:
        """Skip to an offset; returns the position that was reached."""
        while self._position < offset and self.read(min(offset - self._position, CHUNK_BYTES)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        """That many bytes, fewer at the end of the file."""
        while len(self._buffer) < size and (chunk := next(self._chunks, b"")):
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._position += len(data)
        return data


def _parse(header: bytes, extended: Mapping[bytes, bytes], *, name_unreadable: bool) -> Member:
    short, mode, user, group, size, mtime, flag, link, magic, prefix = _FIELDS.unpack(header)
    name = _text(short)
    if magic == b"ustar\0" and prefix[0] != 0:
        name = f"{_text(prefix)}/{name}"
    if flag in (b"\0", b"7"):  # Unix V7's file, and a contiguous file
        flag = Kind.FOLDER.value if flag == b"\0" and name.endswith("/") else Kind.FILE.value
    kind = _KINDS.get(flag, Kind.UNKNOWN)
    if extended and any(field.startswith(b"GNU.sparse.") for field in extended):
        kind = Kind.SPARSE_FILE
    member = Member(
        name=name,
        kind=kind,
        size=_number(size),
        mode=_number(mode),
        mtime=_number(mtime),
        link=_text(link),
        user=_number(user),
        group=_number(group),
        name_unreadable=name_unreadable,
    )
    return _extended(member, extended) if extended else member


def _extended(member: Member, fields: Mapping[bytes, bytes]) -> Member:
    return replace(
        member,
        name=_decoded(fields[b"path"]) if b"path" in fields else member.name,
        size=_decimal(fields.get(b"size"), member.size),
        mtime=_decimal(fields.get(b"mtime"), member.mtime),
        link=_decoded(fields[b"linkpath"]) if b"linkpath" in fields else member.link,
    )


def _text(field: bytes) -> str:
    return _decoded(field.split(b"\0", 1)[0])


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def extends_next(header: bytes | bytearray) -> bool:
    """Whether this header only describes the next header."""
    return header[156:157] in _EXTENSIONS


def header_size(header: bytes | bytearray) -> int:
    """Length of the body behind this header."""
    if _KINDS.get(bytes(header[156:157]), Kind.FILE) in _WITHOUT_BODY:
        return 0
    return _number(bytes(header[124:136]))


@lru_cache(1024)
def _number(field: bytes) -> int:
    """Octal digits, or base 256 where the first bit is set (GNU). Negative and unreadable numbers are 0."""
    if field[0] & 0x80:
        return 0 if field[0] & 0x40 else int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    digits = field.split(b"\0", 1)[0].strip()
    try:
        return int(digits, 8) if digits.isdigit() else 0
    except ValueError:  # 8 or 9
        return 0


def _decimal(digits: bytes | None, default: int) -> int:
    whole = (digits or b"").partition(b".")[0]
    return int(whole) if whole.isdigit() and len(whole) < 20 else default


def _extension(flag: bytes, body: bytes) -> dict[bytes, bytes]:
    """Fields of an extended header, by their pax names."""
    if flag == _LONG_NAME:
        return {b"path": body.rstrip(b"\0")}
    if flag == _LONG_LINK:
        return {b"linkpath": body.rstrip(b"\0")}
    fields: dict[bytes, bytes] = {}
    start = 0
    while start < len(body):  # "<length of this record> <name>=<value>\n"
        space = body.find(b" ", start, start + 8)
        digits = body[start:space]
        end = start + int(digits) if space > 0 and digits.isdigit() else 0
        if not space + 1 < end <= len(body) or len(fields) >= MAX_EXTENDED_FIELDS:
            raise BrokenArchiveError("an extended header is malformed")
        name, equals, value = body[space + 1 : end - 1].partition(b"=")
        if equals:
            fields[name] = value
        start = end
    return fields


def digest_of(chunks: Iterable[bytes]) -> str:
    """SHA-256 of a member's body, in hexadecimal digits."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def top_level_names(archive: Path) -> frozenset[str]:
    """Names directly below the folder that was packed. Raises BrokenArchiveError."""
    with archive.open("rb") as file:
        names = (member.name.removeprefix("./").partition("/")[0] for member in ArchiveReader.of_file(file))
        return frozenset(names) - {"", "."}


def first_file(chunks: Iterable[bytes], limit_bytes: int) -> bytes:
    """Content of the first regular file of an archive, cut to `limit_bytes`; empty if there is none.

    Reads little more of `chunks` than that. Raises BrokenArchiveError.
    """
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > limit_bytes + MAX_EXTENDED_HEADERS * 2 * MAX_EXTENDED_BYTES + CHUNK_BYTES:
            break
    reader = ArchiveReader(BytesIO(data), None)
    for member in reader:
        if member.kind is Kind.FILE:
            content = bytearray()
            for chunk in reader.body():
                content += chunk
                if len(content) >= limit_bytes:
                    break
            return bytes(content[:limit_bytes])
    return b""
