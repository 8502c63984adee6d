"""Resumable connection: numbered messages over a byte stream that can be lost and reopened.

State machines for both ends, without input or output, clocks or threads. The driver runs `DriverEnd` and
the server `ServerEnd`, so there is one implementation of the framing. The caller passes received bytes to
`receive` and writes what `data_to_send` returns, which can be more after a call of any other method.

Guarantees
----------
Each message is delivered once and in order, as long as one of the two ends still has it. The stream may
lose any bytes while it is not attached, may be cut inside a line, and may also carry the bytes of an earlier
server process. An end keeps a message until the other end acknowledges it. An application acknowledges a
message once it does not need it again: the server when the reply is in its log, the driver when it has begun
the work. What an end keeps is bounded in bytes; beyond that, `send` refuses.

Lines
-----
`CHECK BODY\\n`. CHECK is the CRC-32 of BODY in 8 hexadecimal digits. Its initial value is the CRC-32 of the
current nonce (0 in `attach`, `attached` and `refused`), so that a line is dropped if it was torn, glued to
another, or written for another attachment. Numbers are decimal, at most MAX_NUMBER. BODY is one of
  NUMBER ACKNOWLEDGED PAYLOAD   message NUMBER, with an acknowledgement of the other direction. An empty
                                PAYLOAD replaces a message that its sender does not have any more; it is not
                                delivered
  ack ACKNOWLEDGED WRITTEN      acknowledgement without a message; WRITTEN is the last message written before
  lost                          driver to server: a line was damaged, attach again
  attach NONCE GENERATION VERSION SURVIVE_SECONDS ACKNOWLEDGED DELIVERED FIRST
                                server to driver, after a line feed that ends a torn line
  attached NONCE VERSION ACKNOWLEDGED DELIVERED FIRST
                                the driver's answer, after a line feed
  refused NONCE GENERATION      the driver's answer to an `attach` of a lower generation than the current one
NONCE is 32 hexadecimal digits, new for every `attach`. VERSION is the sender's wire version. Of the other
end's messages, the sender has acknowledged those up to ACKNOWLEDGED and delivered those up to DELIVERED to
its application. Of its own messages, it has none before FIRST any more. `attach`, `attached` and `refused`
have this form in every wire version; receivers ignore additional numbers at their end.

Attaching
---------
The server sends `attach` on every stream, and again on the same stream if `attach_due` is set or no answer
comes. It ignores all lines until `attached` with its nonce, because the first bytes of a stream may be the
end of a torn line. The driver obeys the newest `attach`, unless its generation is lower than the current
one. Then each end resends what the other has not delivered. A server process has a higher generation than
the processes before it; a process that was replaced gets `refused` when it attaches again.

A new server process has no messages of its predecessor's, and learns the numbers from `attached`. It must
read the log of replies after that, or after its predecessor's end: until then, the predecessor can log and
acknowledge messages, which the driver then does not send again.
"""

from __future__ import annotations

from binascii import crc32

from decathlon_sandbox import wire

MAX_NUMBER = 10**15 - 1
"""At 10,000 messages a second, it is reached after 3,000 years."""
NONCE_DIGITS = 32
MAX_PREFIX_BYTES = 48
"""Upper limit of a line without its payload: check, two numbers, three spaces and line feed have 42 bytes."""
OVERHEAD_BYTES = 100
"""Counted for every message in addition to its payload, so that many small messages are bounded too. About
what an entry of a dictionary, its key and the header of a `bytes` object occupy."""
ACKNOWLEDGE_AFTER_MESSAGES = 32
ACKNOWLEDGE_AFTER_BYTES = 64 * 1024
ACKNOWLEDGE_AFTER_SECONDS = 0.25
"""When an acknowledgement is sent without a message that could carry it. The caller measures the time. In a
session that is in use, the next message comes earlier and carries it, which costs nothing."""
CHUNK_BYTES = 64 * 1024

_CHECK_BYTES = 9
_CONTROL_KEY = 0
_CONTROL_KINDS = (b"attach", b"attached", b"refused")
_MAX_CONTROL_BYTES = 256
_MAX_QUEUED_CONTROL_LINES = 16
_MAX_DIGITS = len(str(MAX_NUMBER))
_HEXADECIMAL = frozenset(b"0123456789abcdef")


class ConnectionFullError(Exception):
    """A message does not fit into the send buffer; it fits once the other end has acknowledged enough."""


class Limits:
    """Bounds of one end in bytes. Every message counts with OVERHEAD_BYTES more than its payload.

    `send_payload_bytes`, `receive_payload_bytes`: one payload in each direction. `send_buffer_bytes`:
    messages that the other end has not acknowledged. `receive_window_bytes`: messages from the other end that
    the application has not acknowledged; at least the other end's `send_buffer_bytes`.
    """

    __slots__ = (
        "receive_payload_bytes",
        "receive_window_bytes",
        "send_buffer_bytes",
        "send_payload_bytes",
    )

    def __init__(
        self,
        *,
        send_payload_bytes: int,
        send_buffer_bytes: int,
        receive_payload_bytes: int,
        receive_window_bytes: int,
    ) -> None:
        if send_buffer_bytes < send_payload_bytes + OVERHEAD_BYTES:
            raise ValueError("the largest message must fit into the send buffer")
        if receive_window_bytes < receive_payload_bytes + OVERHEAD_BYTES:
            raise ValueError("the largest message must fit into the receive window")
        self.send_payload_bytes = send_payload_bytes
        self.send_buffer_bytes = send_buffer_bytes
        self.receive_payload_bytes = receive_payload_bytes
        self.receive_window_bytes = receive_window_bytes


class _End:
    """What both ends have in common: numbers, buffers, acknowledgements and lines."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._max_line_bytes = limits.receive_payload_bytes + MAX_PREFIX_BYTES
        # Messages to the other end. `_send_buffer` has numbers from `_first` to `_sent`; missing ones were
        # lost with an earlier process.
        self._send_buffer: dict[int, bytes] = {}
        self._send_buffer_bytes = 0
        self._first = 1
        self._written = 0
        self._sent = 0
        # Messages from the other end. `_in_progress` has the size of those that are not acknowledged.
        self._in_progress: dict[int, int] = {}
        self._in_progress_bytes = 0
        self._acknowledged = 0
        self._delivered = 0
        # What no line has acknowledged yet.
        self._announced = 0
        self._unannounced_messages = 0
        self._unannounced_bytes = 0
        # The stream.
        self._key = _CONTROL_KEY
        self._control_lines: list[bytes] = []
        self._partial_line = bytearray()
        self._partial_check = 0
        self._skips_line = False

        self.attached = False
        self.failure: str | None = None
        """Why the connection cannot continue. Once set, nothing is delivered or sent any more."""
        self.peer_version: int | None = None
        """The other end's wire version, once it has been attached."""
        self.valid_lines = 0
        """Number of lines received that the other end wrote for the current attachment."""

    # sending

    @property
    def unacknowledged_bytes(self) -> int:
        """Size of the messages that the other end has not acknowledged."""
        return self._send_buffer_bytes

    @property
    def room_bytes(self) -> int:
        """Size of the largest payload that `send` accepts; 0 or less if it accepts none.

        It grows in calls of `receive` only.
        """
        room_bytes = self._limits.send_buffer_bytes - self._send_buffer_bytes - OVERHEAD_BYTES
        return min(room_bytes, self._limits.send_payload_bytes)

    @property
    def next_number(self) -> int:
        """The number that the next message will have."""
        return self._sent + 1

    @property
    def first_unacknowledged(self) -> int:
        """The number of the oldest message that the other end has not acknowledged, or else the next one."""
        return self._first

    def send(self, payload: bytes) -> int:
        """Accept a message, attached or not, and return its number.

        Raises ConnectionFullError, and ValueError for a payload that is empty or contains a line feed.
        """
        if not payload or b"\n" in payload:
            raise ValueError("a payload must not be empty or contain a line feed")
        if len(payload) > self.room_bytes:
            raise ConnectionFullError(f"{len(payload)} bytes exceed the room of {self.room_bytes} bytes")
        number = self._sent + 1
        if number > MAX_NUMBER:
            self._fail("it used all numbers")
            raise ConnectionFullError("there are no more numbers")
        self._sent = number
        self._send_buffer[number] = payload
        self._send_buffer_bytes += len(payload) + OVERHEAD_BYTES
        return number

    def data_to_send(self, limit_bytes: int = CHUNK_BYTES) -> bytes:
        """Return the next bytes for the stream; empty if there are none now.

        Consists of whole lines: at most `limit_bytes`, or one line more. Write all of it before the next
        call. What is not written when a stream ends, or is attached again, can be dropped.
        """
        lines, self._control_lines = self._control_lines, []
        if not self.attached:
            return b"".join(lines)
        if self._written < self._sent:
            self._add_messages(lines, limit_bytes)
        elif self.acknowledgement_due:
            lines.append(self._acknowledgement_line())
        return b"".join(lines)

    def _add_messages(self, lines: list[bytes], limit_bytes: int) -> None:
        key, acknowledged, messages = self._key, self._acknowledged, self._send_buffer
        number, last = self._written, self._sent
        size_bytes = 0
        while number < last and size_bytes < limit_bytes:
            number += 1
            payload = messages.get(number, b"")
            prefix = b"%d %d " % (number, acknowledged)
            lines.append(b"%08x %b%b\n" % (crc32(payload, crc32(prefix, key)), prefix, payload))
            size_bytes += len(payload) + MAX_PREFIX_BYTES
        self._written = number
        self._mark_announced()

    # acknowledging

    @property
    def acknowledgement_pending(self) -> bool:
        """Whether there is an acknowledgement that no line has carried yet.

        The caller calls `acknowledge_now` if this has been so for ACKNOWLEDGE_AFTER_SECONDS.
        """
        return self.attached and self._acknowledged > self._announced

    @property
    def acknowledgement_due(self) -> bool:
        """Whether there is so much to acknowledge that the next `data_to_send` acknowledges it."""
        return self.acknowledgement_pending and (
            self._unannounced_messages >= ACKNOWLEDGE_AFTER_MESSAGES
            or self._unannounced_bytes >= ACKNOWLEDGE_AFTER_BYTES
        )

    @property
    def in_progress_bytes(self) -> int:
        """Size of the messages that the application has received and not acknowledged."""
        return self._in_progress_bytes

    def acknowledge(self, number: int) -> None:
        """Acknowledge one message, so that the other end drops it. In any order; each message once.

        Raises KeyError for a number that is not in progress.
        """
        size_bytes = self._in_progress.pop(number)
        self._in_progress_bytes -= size_bytes
        self._unannounced_messages += 1
        self._unannounced_bytes += size_bytes
        self._advance_acknowledged()

    def acknowledge_now(self) -> None:
        """Send an acknowledgement without waiting for a message that could carry it."""
        if self.acknowledgement_pending:
            self._control_lines.append(self._acknowledgement_line())

    def _advance_acknowledged(self) -> None:
        while self._acknowledged < self._delivered and self._acknowledged + 1 not in self._in_progress:
            self._acknowledged += 1

    def _acknowledgement_line(self) -> bytes:
        self._mark_announced()
        return _line(b"ack %d %d" % (self._acknowledged, self._written), self._key)

    def _mark_announced(self) -> None:
        self._announced = self._acknowledged
        self._unannounced_messages = self._unannounced_bytes = 0

    # receiving

    def receive(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take bytes of the stream and return the messages that they complete, in order, with their numbers.

        Raises nothing: if the other end breaks the protocol, `failure` is set.
        """
        messages: list[tuple[int, bytes]] = []
        *lines, rest = data.split(b"\n")
        for line in lines:
            check = None
            if self._partial_line or self._skips_line or len(line) > self._max_line_bytes:
                line, check = self._complete_line(line)
            if line and self.failure is None:
                self._on_line(line, check, messages)
        if rest:
            self._add_to_line(rest)
        return messages

    def stream_lost(self) -> None:
        """The stream has ended. Messages are kept until the next stream is attached."""
        self.attached = False
        self._control_lines.clear()
        self._partial_line.clear()
        self._skips_line = False

    def _complete_line(self, end: bytes) -> tuple[bytes, int]:
        """The whole line and its check; empty if it was too long."""
        self._add_to_line(end)
        line, self._partial_line, self._skips_line = bytes(self._partial_line), bytearray(), False
        return line, self._partial_check

    def _add_to_line(self, part: bytes) -> None:
        if self._skips_line or self.failure is not None:
            return
        # Part by part: the check of a long line takes milliseconds. The key changes between lines only.
        begun_bytes = len(self._partial_line)
        if not begun_bytes:
            self._partial_check = self._key
        self._partial_check = crc32(
            memoryview(part)[max(0, _CHECK_BYTES - begun_bytes) :], self._partial_check
        )
        self._partial_line += part
        if len(self._partial_line) > self._max_line_bytes:
            self._partial_line.clear()
            self._skips_line = True
            if self.attached:
                self._on_overlong_line()

    def _on_line(self, line: bytes, check: int | None, messages: list[tuple[int, bytes]]) -> None:
        """Handle a line. `check`: of its body, None if it has not been computed."""
        if check is None:
            check = crc32(memoryview(line)[_CHECK_BYTES:], self._key)
        if self.attached and line[:_CHECK_BYTES] == b"%08x " % check:
            self.valid_lines += 1
            self._on_valid_line(line.split(b" ", 3)[1:], messages)
        elif (fields := _control_fields(line)) is not None:
            self._on_control_line(*fields)
        elif self.attached:
            self._on_damaged_line()

    def _on_valid_line(self, fields: list[bytes], messages: list[tuple[int, bytes]]) -> None:
        kind = fields[0]
        if kind == b"lost" and len(fields) == 1:
            self._on_lost_line()
        elif len(fields) != 3 or (second := _number(fields[1])) is None:
            self._fail("it sent a malformed line")
        elif (number := _number(kind)) is not None:
            if self._take_acknowledgement(second):
                self._on_message(number, fields[2], messages)
        elif kind == b"ack" and (written := _number(fields[2])) is not None:
            if self._take_acknowledgement(second) and written > self._delivered:
                self._on_damaged_line()
        else:
            self._fail("it sent a malformed line")

    def _on_message(self, number: int, payload: bytes, messages: list[tuple[int, bytes]]) -> None:
        if number <= self._delivered:
            return  # resent
        size_bytes = len(payload) + OVERHEAD_BYTES
        if number > self._delivered + 1:
            self._on_damaged_line()
        elif self._in_progress_bytes + size_bytes > self._limits.receive_window_bytes:
            self._fail(f"it sent over {self._limits.receive_window_bytes} bytes without an acknowledgement")
        elif payload:
            self._delivered = number
            self._in_progress[number] = size_bytes
            self._in_progress_bytes += size_bytes
            messages.append((number, payload))
        else:
            self._delivered = number
            self._unannounced_messages += 1
            self._advance_acknowledged()

    def _take_acknowledgement(self, number: int) -> bool:
        """Drop what the other end has acknowledged; whether the acknowledgement is valid."""
        if number > self._sent:
            self._fail("it acknowledged a message that was never sent")
            return False
        if number >= self._first:
            # Not always by counting up to `number`: to a new server process, a driver can name a huge one.
            if number - self._first < len(self._send_buffer):
                acknowledged = range(self._first, number + 1)
            else:
                acknowledged = [key for key in self._send_buffer if key <= number]
            for key in acknowledged:
                payload = self._send_buffer.pop(key, None)
                if payload is not None:
                    self._send_buffer_bytes -= len(payload) + OVERHEAD_BYTES
            self._first = number + 1
            self._written = max(self._written, number)
        return True

    # attaching

    def _positions(self) -> bytes:
        return b"%d %d %d" % (self._acknowledged, self._delivered, self._first)

    def _resume(
        self, nonce: bytes, acknowledged: int, delivered: int, first: int, *, new_process: bool
    ) -> None:
        """Continue from the other end's positions.

        `new_process`: one of the ends has replaced another, which alone may have known about some messages.
        """
        if acknowledged > delivered or delivered > self._sent:
            self._fail("it received a message that was never sent")
        elif delivered < self._first - 1 and not new_process:
            self._fail("it lost a message that it had acknowledged")
        elif first > self._delivered + 1 and not new_process:
            self._fail("it dropped a message that was not acknowledged")
        elif self._take_acknowledgement(acknowledged):
            self._written = max(delivered, self._first - 1)
            if first > self._delivered + 1:
                self._delivered = first - 1
                self._acknowledged = min(self._in_progress, default=first) - 1
            self._mark_announced()
            self._key = crc32(nonce)
            self.valid_lines += 1
            self.attached = True

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self.attached = False
            self._control_lines.clear()
            self._partial_line.clear()

    # differences between the ends

    def _on_control_line(self, kind: bytes, nonce: bytes, numbers: list[int]) -> None:
        raise NotImplementedError

    def _on_lost_line(self) -> None:
        raise NotImplementedError

    def _on_damaged_line(self) -> None:
        raise NotImplementedError

    def _on_overlong_line(self) -> None:
        raise NotImplementedError


class ServerEnd(_End):
    """The server's end. The caller calls `attach` for every stream.

    `generation`: higher than that of every server process before this one. `survive_seconds`: how long the
    driver waits for a server; 0 if the end of the stream is the end. `taken_back`: an earlier process had the
    connection. Then `send` refuses everything until it is attached, since the driver tells which numbers are
    used; what that process sent and the driver did not receive is lost.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        generation: int,
        survive_seconds: int,
        taken_back: bool = False,
    ) -> None:
        super().__init__(limits)
        self._generation = generation
        self._survive_seconds = survive_seconds
        self._nonce: bytes | None = None
        self._must_learn_numbers = taken_back
        self.attach_due = False
        """Whether `attach` should be called again, because a line was lost or damaged."""
        self.was_replaced = False
        """Whether the failure is that another server process has taken the driver over."""

    @property
    def room_bytes(self) -> int:
        return -1 if self._must_learn_numbers else super().room_bytes

    def attach(self, nonce: str) -> None:
        """Attach to a new stream, or once more to the same one. `nonce` is 32 random hexadecimal digits.

        Call it again with another nonce if `attached` is not set after some time. Limit how often: the
        driver can demand it, and both ends then resend.
        """
        data = nonce.encode()
        if len(data) != NONCE_DIGITS or not _HEXADECIMAL.issuperset(data):
            raise ValueError(f"a nonce has {NONCE_DIGITS} hexadecimal digits")
        self._nonce = data
        self.attached = self.attach_due = False
        numbers = b"%d %d %d" % (self._generation, wire.VERSION, self._survive_seconds)
        body = b"attach %b %b %b" % (data, numbers, self._positions())
        self._control_lines = [b"\n" + _line(body, _CONTROL_KEY)] if self.failure is None else []

    def stream_lost(self) -> None:
        super().stream_lost()
        self._nonce = None
        self.attach_due = False

    def _on_control_line(self, kind: bytes, nonce: bytes, numbers: list[int]) -> None:
        if nonce != self._nonce:
            # Another server has attached, or the driver answers late. Attaching again shows which.
            self.attach_due = self.attached
        elif kind == b"refused":
            if numbers[0] > self._generation:
                self.was_replaced = True
                self._fail("another server process has taken it over")
        elif kind == b"attached" and len(numbers) >= 4 and not self.attached:
            version, acknowledged, delivered, first = numbers[:4]
            self.peer_version = version
            if version != wire.VERSION:
                self._fail(f"it has wire version {version}, and this server has {wire.VERSION}")
                return
            new_process, self._must_learn_numbers = self._must_learn_numbers, False
            if new_process:
                self._sent = delivered
                self._first = delivered + 1
            self._resume(nonce, acknowledged, delivered, first, new_process=new_process)

    def _on_lost_line(self) -> None:
        self.attach_due = True

    def _on_damaged_line(self) -> None:
        self.attach_due = True

    def _on_overlong_line(self) -> None:
        self._fail(f"it sent a line of more than {self._max_line_bytes} bytes")


class DriverEnd(_End):
    """The driver's end. It answers the server's `attach`; what it sends before is kept until then."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.generation = -1
        """The generation of the server process that is attached; -1 before the first."""
        self.attachments = 0
        """How often a server has attached."""
        self._is_new_process = True
        self._valid_lines_at_attach = 0
        self._reported_loss = False
        self.survive_seconds = 0
        """How long to wait for a server after its last valid line; 0: the end of the stream is the end."""

    def _on_control_line(self, kind: bytes, nonce: bytes, numbers: list[int]) -> None:
        if kind != b"attach" or len(numbers) < 6:
            return
        generation, version, survive_seconds, acknowledged, delivered, first = numbers[:6]
        if generation < self.generation:
            if len(self._control_lines) < _MAX_QUEUED_CONTROL_LINES:
                self._control_lines.append(_line(b"refused %b %d" % (nonce, self.generation), _CONTROL_KEY))
            return
        if generation > self.generation:
            self.generation = generation
            self._is_new_process = True
        elif self.valid_lines > self._valid_lines_at_attach:
            # Without a line since the last `attach`, the server may not have received the answer, and with it
            # the positions that it could not know.
            self._is_new_process = False
        self.peer_version = version
        self.survive_seconds = survive_seconds
        self._reported_loss = False
        self._resume(nonce, acknowledged, delivered, first, new_process=self._is_new_process)
        self._valid_lines_at_attach = self.valid_lines
        if self.attached:
            self.attachments += 1
            body = b"attached %b %d %b" % (nonce, wire.VERSION, self._positions())
            self._control_lines = [b"\n" + _line(body, _CONTROL_KEY)]

    def _on_lost_line(self) -> None:
        self._fail("it sent a line that only drivers send")

    def _on_damaged_line(self) -> None:
        # Once for every attachment: all lines of a server process that was replaced arrive as damaged ones.
        if not self._reported_loss:
            self._reported_loss = True
            self._control_lines.append(_line(b"lost", self._key))

    def _on_overlong_line(self) -> None:
        self._on_damaged_line()


def _line(body: bytes, key: int) -> bytes:
    return b"%08x %b\n" % (crc32(body, key), body)


def _control_fields(line: bytes) -> tuple[bytes, bytes, list[int]] | None:
    """Kind, nonce and numbers of an intact `attach`, `attached` or `refused`; None for any other line."""
    # The end of a torn message is never taken for one: it ends with the brace of its JSON, not with a number.
    if len(line) > _MAX_CONTROL_BYTES or line[:_CHECK_BYTES] != b"%08x " % crc32(line[_CHECK_BYTES:]):
        return None
    kind, *fields = line[_CHECK_BYTES:].split(b" ")
    if kind not in _CONTROL_KINDS or len(fields) < 2 or len(fields[0]) != NONCE_DIGITS:
        return None
    numbers = [number for field in fields[1:] if (number := _number(field)) is not None]
    if len(numbers) != len(fields) - 1 or not _HEXADECIMAL.issuperset(fields[0]):
        return None
    return kind, fields[0], numbers


def _number(field: bytes) -> int | None:
    return int(field) if field.isdigit() and len(field) <= _MAX_DIGITS else None
