"""The lines between a server and a driver; the check sum of each follows from the line before.

Both ends run `Lines`: it has no input or output, no clock and no thread. The caller passes received bytes to
`receive` and writes what `frame` returns.

`CHECK BODY\\n`: CHECK is the CRC-32 of BODY in 8 hexadecimal digits. Its initial value is the CHECK of the
line before in that direction; for the first line it is the CRC-32 of the nonce of the attachment. So a line
that was torn, glued to another, changed, doubled or written for another attachment is damaged, and so is the
line after a missing line: the next line notices every loss, and no line needs a number. After a lost line
every line is damaged, until the server attaches again.

BODY is a JSON object (a message), or, with IDs in decimal,
  pending ID...    server to driver, the first line after `attach`: the requests whose responses it waits for
  unknown ID...    driver to server, its answer: requests that it has never received
  done ID...       server to driver: the responses to these are not needed any more
  lost             driver to server: a line was damaged, attach again

Three control lines have a CHECK that starts at 0, and this form in every wire version; receivers ignore
additional numbers at their end:
  attach NONCE GENERATION VERSION SURVIVE_SECONDS    server to driver, after a line feed that ends a torn line
  attached NONCE VERSION                             the driver's answer, after a line feed
  refused NONCE GENERATION                           the answer to a lower generation than the current one
NONCE is 32 hexadecimal digits, new for every `attach`.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Iterable, Iterator

NONCE_DIGITS = 32
MAX_NUMBER = 10**19
"""Above every number in a line: ids have up to 63 bits."""

DAMAGED = b"\0damaged"
OVERLONG = b"\0overlong"
"""Stand for a line that cannot be read, or is longer than `max_bytes`; no body is equal to one of them."""

_CHECK_BYTES = 9
_CONTROL_KINDS = (b"attach", b"attached", b"refused")
_MAX_CONTROL_BYTES = 256
_HEXADECIMAL = frozenset(b"0123456789abcdef")


class Control:
    """A control line."""

    __slots__ = ("kind", "nonce", "numbers")

    def __init__(self, kind: bytes, nonce: bytes, numbers: list[int]) -> None:
        self.kind = kind
        self.nonce = nonce
        self.numbers = numbers


class Lines:
    """The lines of one end in both directions. `max_bytes`: longest body that is received."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._max_bytes = max_bytes + _CHECK_BYTES
        self._read_check = self._write_check = 0
        # The beginning of a line whose end has not come, its check, and whether the line is too long.
        self._part = bytearray()
        self._part_check = 0
        self._skips = False
        self.reads = False
        """Whether lines are read. Otherwise only control lines are, and nothing is damaged."""

    def begin_reading(self, nonce: bytes) -> None:
        """Read lines that the other end writes for this attachment."""
        self._read_check, self.reads = crc32(nonce), True

    def begin_writing(self, nonce: bytes) -> None:
        """The next line is the first that is written for this attachment."""
        self._write_check = crc32(nonce)

    def stop_reading(self) -> None:
        """Read no lines until the next attachment."""
        self.reads = False

    def stream_lost(self) -> None:
        """The stream has ended: read no lines, and forget the beginning of one."""
        self.reads = self._skips = False
        self._part.clear()

    def frame(self, body: bytes) -> bytes:
        """The line of a body, which is not empty. Lines are written in the order of the calls."""
        self._write_check = check = crc32(body, self._write_check)
        return b"%08x %b\n" % (check, body)

    def receive(self, data: bytes) -> Iterator[bytes | Control]:
        """The bodies and control lines that these bytes complete, in order; DAMAGED or OVERLONG for others.

        The caller takes all of them before the next call, and may begin or stop reading meanwhile.
        """
        *lines, rest = data.split(b"\n")
        for line in lines:
            if self._part or self._skips:
                yield from self._end_of_part(line)
            elif line:
                yield from self._read(line, None)
        if rest:
            yield from self._add(rest)

    def _end_of_part(self, end: bytes) -> Iterator[bytes | Control]:
        yield from self._add(end)
        line, self._part, skipped, self._skips = bytes(self._part), bytearray(), self._skips, False
        if not skipped:
            yield from self._read(line, self._part_check)

    def _add(self, part: bytes) -> Iterator[bytes]:
        if self._skips:
            return
        # Part by part: the check of a long line takes milliseconds. It can begin with this part only.
        begun_bytes = len(self._part)
        if not begun_bytes:
            self._part_check = self._read_check
        self._part_check = crc32(memoryview(part)[max(0, _CHECK_BYTES - begun_bytes) :], self._part_check)
        self._part += part
        if len(self._part) > self._max_bytes:
            self._part.clear()
            self._skips = True
            if self.reads:
                yield OVERLONG

    def _read(self, line: bytes, check: int | None) -> Iterator[bytes | Control]:
        """A whole line. `check`: of its body, None if it has not been computed."""
        if self.reads:
            if len(line) > self._max_bytes:
                yield OVERLONG
                return
            if check is None:
                check = crc32(memoryview(line)[_CHECK_BYTES:], self._read_check)
            if line[:_CHECK_BYTES] == b"%08x " % check:
                self._read_check = check
                yield line[_CHECK_BYTES:]
                return
        control = _control(line)
        if control is not None:
            yield control
        elif self.reads:
            yield DAMAGED


def attach_line(nonce: bytes, generation: int, version: int, survive_seconds: int) -> bytes:
    return b"\n" + _control_line(b"attach %b %d %d %d" % (nonce, generation, version, survive_seconds))


def attached_line(nonce: bytes, version: int) -> bytes:
    return b"\n" + _control_line(b"attached %b %d" % (nonce, version))


def refused_line(nonce: bytes, generation: int) -> bytes:
    return b"\n" + _control_line(b"refused %b %d" % (nonce, generation))


def body_of_ids(kind: bytes, ids: Iterable[int]) -> bytes:
    """The body of `pending`, `unknown` or `done`."""
    return b" ".join([kind, *[b"%d" % number for number in ids]])


def ids_of_body(body: bytes, kind: bytes) -> list[int] | None:
    """The ids in a body of this kind; None for any other body."""
    if not body.startswith(kind):
        return None
    first, *fields = body.split(b" ")
    if first != kind:
        return None
    ids = [number for field in fields if (number := _number(field)) is not None]
    return ids if len(ids) == len(fields) else None


def _control_line(body: bytes) -> bytes:
    return b"%08x %b\n" % (crc32(body), body)


def _control(line: bytes) -> Control | None:
    """An intact control line; None for any other line."""
    # The end of a torn message is never taken for one: it ends with the brace of its JSON, not with a number.
    if len(line) > _MAX_CONTROL_BYTES or line[:_CHECK_BYTES] != b"%08x " % crc32(line[_CHECK_BYTES:]):
        return None
    kind, *fields = line[_CHECK_BYTES:].split(b" ")
    if kind not in _CONTROL_KINDS or len(fields) < 2 or len(fields[0]) != NONCE_DIGITS:
        return None
    numbers = [number for field in fields[1:] if (number := _number(field)) is not None]
    if len(numbers) != len(fields) - 1 or not _HEXADECIMAL.issuperset(fields[0]):
        return None
    return Control(kind, fields[0], numbers)


def _number(field: bytes) -> int | None:
    return int(field) if field.isdigit() and len(field) < len(str(MAX_NUMBER)) else None
