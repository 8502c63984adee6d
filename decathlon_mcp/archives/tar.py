"""Tar archives from strangers, read as a stream of headers in constant memory, and the ones we write.

`tarfile` reads extended headers of any size into memory; this reads ustar, GNU long names and the few pax
fields that say what a member is (POSIX.1-2017 `pax`, "ustar Interchange Format"), bounds each of them, and
leaves the bodies where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 512
MAX_EXTENDED_BYTES = 1 << 14
MAX_EXTENDED_FIELDS = 64
MAX_EXTENDED_HEADERS = 8
"""So many before one member."""
FILE, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, FOLDER, FIFO, SPARSE = (
    b"0",
    b"1",
    b"2",
    b"3",
    b"4",
    b"5",
    b"6",
    b"S",
)
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENSIONS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)
_BODILESS = (HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, FOLDER, FIFO)
_ZEROS = bytes(BLOCK)


class BrokenTarError(ValueError):
    """From here on the archive is no tar; the message says where."""


@dataclass(slots=True)
class Member:
    """One member's header. `kind` is one of the constants above, or the unknown type as it came.

    `offset` is where its body of `size` bytes begins. `overlong`: its extended header was too large to be
    read, so its name is not known.
    """

    name: bytes
    kind: bytes
    size: int
    mode: int
    mtime: int
    link: bytes
    offset: int
    overlong: bool = False


def read_members(file: BinaryIO) -> Iterator[Member]:
    """Every member of a plain tar, in order. Between two, the caller may read from `file` as it likes.

    Raises BrokenTarError where the archive ends in the middle of a member or is no tar.
    """
    end = file.seek(0, 2)
    offset = headers = 0
    extended: dict[bytes, bytes] = {}
    overlong = False
    while offset < end:
        file.seek(offset)
        block = file.read(BLOCK)
        if block == _ZEROS:
            return
        member = _parse(block, offset)
        if member.kind not in _EXTENSIONS:
            _apply(extended, member)
        if member.kind == SPARSE and block[156:157] == SPARSE:
            member.offset = _after_sparse_map(file, block, member.offset)
        size = 0 if member.kind in _BODILESS else member.size
        if member.offset + size > end:
            raise BrokenTarError(f"the archive ends within the member at byte {offset}")
        offset = member.offset + size + -size % BLOCK
        if member.kind in _EXTENSIONS:
            headers += 1
            if headers > MAX_EXTENDED_HEADERS:
                raise BrokenTarError(f"too many extended headers at byte {offset}")
            if size > MAX_EXTENDED_BYTES:
                overlong = True
            elif member.kind != _PAX_GLOBAL:
                extended |= _extension(member.kind, file.read(size))
            continue
        member.overlong = overlong
        extended, overlong, headers = {}, False, 0
        yield member


def _parse(header: bytes, offset: int) -> Member:
    if len(header) < BLOCK:
        raise BrokenTarError(f"the archive ends within a header at byte {offset}")
    if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * 0x20:
        raise BrokenTarError(f"what stands at byte {offset} is no header")
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345] != 0:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    kind = header[156:157]
    if kind in (b"\0", b"7"):
        kind = FOLDER if kind == b"\0" and name.endswith(b"/") else FILE
    return Member(
        name=name,
        kind=kind,
        size=_number(header[124:136]),
        mode=_number(header[100:108]),
        mtime=_number(header[136:148]),
        link=header[157:257].split(b"\0", 1)[0],
        offset=offset + BLOCK,
    )


def _number(field: bytes) -> int:
    """Octal digits, or base 256 where the first bit is set (GNU). Negative and unreadable ones are 0."""
    if field[0] & 0x80:
        return 0 if field[0] & 0x40 else int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        return 0


def _after_sparse_map(file: BinaryIO, header: bytes, body: int) -> int:
    """GNU's old sparse format: the map goes on in blocks before the body."""
    more = header[482]
    while more:
        file.seek(body)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise BrokenTarError(f"the archive ends within a map at byte {body}")
        more, body = block[504], body + BLOCK
    return body


def _extension(kind: bytes, body: bytes) -> dict[bytes, bytes]:
    if kind == _LONG_NAME:
        return {b"path": body.rstrip(b"\0")}
    if kind == _LONG_LINK:
        return {b"linkpath": body.rstrip(b"\0")}
    fields: dict[bytes, bytes] = {}
    start = 0
    while start < len(body):
        space = body.find(b" ", start, start + 8)
        digits = body[start:space]
        end = start + int(digits) if space > 0 and digits.isdigit() else 0
        if not space + 1 < end <= len(body) or len(fields) >= MAX_EXTENDED_FIELDS:
            raise BrokenTarError("an extended header is not of its form")
        name, equals, value = body[space + 1 : end - 1].partition(b"=")
        if equals:
            fields[name] = value
        start = end
    return fields


def _apply(extended: dict[bytes, bytes], member: Member) -> None:
    if not extended:
        return
    member.name = extended.get(b"path", member.name)
    member.link = extended.get(b"linkpath", member.link)
    if any(name.startswith(b"GNU.sparse.") for name in extended):
        member.kind = SPARSE
    member.size = _whole(extended.get(b"size"), member.size)
    member.mtime = _whole(extended.get(b"mtime"), member.mtime)


def _whole(digits: bytes | None, otherwise: int) -> int:
    whole = (digits or b"").partition(b".")[0]
    return int(whole) if whole.isdigit() and len(whole) < 20 else otherwise


def header(name: bytes, kind: bytes, *, size: int, mode: int, mtime: int, link: bytes = b"") -> bytes:
    """A member's header as GNU tar writes it, with blocks for names over 100 bytes; owned by root."""
    long = b"".join(
        _block(b"././@LongLink", extension, size=len(text) + 1, mode=0, mtime=0, link=b"")
        + (text + b"\0").ljust(-(-(len(text) + 1) // BLOCK) * BLOCK, b"\0")
        for text, extension in ((link, _LONG_LINK), (name, _LONG_NAME))
        if len(text) > 100
    )
    return long + _block(name[:100], kind, size=size, mode=mode, mtime=mtime, link=link[:100])


def _block(name: bytes, kind: bytes, *, size: int, mode: int, mtime: int, link: bytes) -> bytes:
    sized = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")
    block = b"".join(
        (
            name.ljust(100, b"\0"),
            b"%07o\0" % mode,
            b"0000000\0" * 2,
            sized,
            b"%011o\0" % mtime,
            b"        ",
            kind,
            link.ljust(100, b"\0"),
            b"ustar  \0",
            bytes(BLOCK - 265),
        )
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padding(size: int) -> bytes:
    """What follows a body of that size, up to the next block."""
    return bytes(-size % BLOCK)


END = _ZEROS * 2


def of_files(files: Mapping[str, bytes]) -> bytes:
    """A whole archive of a few files, by name; anyone may write to them."""
    members = (
        header(name.encode(), FILE, size=len(body), mode=0o666, mtime=0) + body + padding(len(body))
        for name, body in files.items()
    )
    return b"".join(members) + END
