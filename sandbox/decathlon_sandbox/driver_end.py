"""The driver's connection to the server: attachments, lines, backpressure, and the lease (`wire`)."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable

from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Backpressure
from decathlon_sandbox.driver_requests import HIGH_WATER_BYTES, RESERVED_BYTES, Request, Requests
from decathlon_sandbox.event_loop import EventLoop, Timer, log
from decathlon_sandbox.lines import (
    DAMAGED,
    OVERLONG,
    Control,
    Lines,
    attached_line,
    ids_of_body,
    refused_line,
)
from decathlon_sandbox.strict_json import JsonObject

EMPTY_INPUT_SECONDS = 0.2
"""How often an input at its end is read again. A FIFO can get another writer."""
LOOK_SECONDS = 0.25
MAX_LOOKS = 240
"""How often, and how many times, the input is registered again while the sandbox may be a copy: a minute."""
_CHUNK_BYTES = 1 << 16


class Lease:
    """Calls `on_end` once nothing has been heard of a server for longer than the lease."""

    def __init__(self, loop: EventLoop, on_end: Callable[[], object]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._seconds = wire.LEASE_SECONDS
        self._heard_at = time.monotonic()
        self._timer: Timer | None = None
        self.may_be_saved = False
        """Whether the sandbox is about to be saved. In a copy of it, the clock shows the time that has passed
        since then, in which no server could be heard: the lease begins again."""

    def begin(self, seconds: int) -> None:
        """Begin leases of so many seconds; of LEASE_SECONDS with 0."""
        self._seconds = seconds or wire.LEASE_SECONDS
        self.renew()
        self._check()

    def renew(self) -> None:
        """A server was heard."""
        self._heard_at = time.monotonic()

    def _check(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if time.monotonic() >= self._heard_at + self._seconds and self.may_be_saved:
            self.may_be_saved = False
            self.renew()
        remaining = self._heard_at + self._seconds - time.monotonic()
        if remaining > 0:
            self._timer = self._loop.call_later(remaining, self._check)
        else:
            log(f"decathlon: nothing received for {self._seconds:g} s, the driver exits")
            self._on_end()


class Output:
    """Bodies that wait to be written to the server that is attached, and the descriptor that takes them.

    Their lines are made when they are written: a body that is kept does not take twice its memory.
    """

    def __init__(self, loop: EventLoop, fd: int, lines: Lines, on_writable: Callable[[], object]) -> None:
        self._loop = loop
        self._fd = fd
        self._lines = lines
        self._on_writable = on_writable
        self._queue: collections.deque[tuple[bytes, bool]] = collections.deque()
        self.notification_bytes = 0
        """Size of the notifications that wait."""
        self._part = memoryview(b"")
        """Lines that are written in part."""
        self._is_watched = False
        os.set_blocking(fd, False)

    def add(self, body: bytes, *, is_notification: bool = False) -> None:
        self._queue.append((body, is_notification))
        if is_notification:
            self.notification_bytes += len(body)

    def answer(self, line: bytes) -> None:
        """Write a control line before all that waits; not while something else is written."""
        if not self._part:
            self._part = memoryview(line)

    def clear(self) -> None:
        self._part = memoryview(b"")
        self._queue.clear()
        self.notification_bytes = 0

    def flush(self) -> bool:
        """Write what there is until the descriptor accepts no more; False if it is broken.

        `on_writable` is called when it accepts more.
        """
        is_broken = False
        while self._part or self._queue:
            self._part = self._part or memoryview(self._next_lines())
            try:
                written = os.write(self._fd, self._part)
            except BlockingIOError:
                break
            except OSError:
                is_broken = True
                self.clear()
                break
            self._part = self._part[written:]
        if self._part and not self._is_watched:
            self._loop.add_writer(self._fd, self._on_writable)
        elif self._is_watched and not self._part:
            self._loop.remove(self._fd)
        self._is_watched = bool(self._part)
        return not is_broken

    def _next_lines(self) -> bytes:
        lines: list[bytes] = []
        size_bytes = 0
        while self._queue and size_bytes < _CHUNK_BYTES:
            body, is_notification = self._queue.popleft()
            if is_notification:
                self.notification_bytes -= len(body)
            lines.append(self._lines.frame(body))
            size_bytes += len(body)
        return b"".join(lines)


class Connection:
    """Sends and receives messages over two descriptors, which it owns. Stops the loop at its end.

    `backpressure` is paused while more than HIGH_WATER_BYTES are kept or not written. `on_attached` is called
    when a server has attached, the same process or another, before anything that it sends; for `begin` and
    `on_notification` see `Requests`.
    """

    def __init__(
        self,
        loop: EventLoop,
        input_fd: int,
        output_fd: int,
        backpressure: Backpressure,
        *,
        begin: Callable[[Request], object],
        on_notification: Callable[[str, JsonObject], object],
        on_attached: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._input_fd = input_fd
        self._backpressure = backpressure
        self._on_attached = on_attached
        self._requests = Requests(self, begin, on_notification)
        self._lines = Lines(wire.MAX_LINE_BYTES)
        self._output = Output(loop, output_fd, self._lines, self._flush)
        self.generation = -1
        """The generation of the server process that is attached; -1 before the first."""
        self._survive_seconds = 0
        self._lease = Lease(loop, self._finish)
        self._reported_loss = False
        self._looks = 0
        """How often the input is still registered again."""
        os.set_blocking(input_fd, False)

    def start(self) -> None:
        self._watch_input()
        self._lease.begin(0)

    # what the driver sends

    @property
    def notification_bytes(self) -> int:
        """Size of the notifications that wait to be written."""
        return self._output.notification_bytes

    @property
    def has_room(self) -> bool:
        """Whether responses to come leave room, so that messages which can wait need not."""
        return self._requests.free_bytes >= RESERVED_BYTES // 2

    def send(self, body: bytes) -> None:
        """Send a body that the server gets again when it attaches again; dropped if none is attached."""
        self._add(body)

    def notify(self, payload: bytes) -> None:
        """Send a notification, or a response to nothing that is known; dropped if no server is attached."""
        self._add(payload, is_notification=True)

    def _add(self, body: bytes, *, is_notification: bool = False) -> None:
        if self._lines.reads:
            self._output.add(body, is_notification=is_notification)
        self._flush()

    def expect_saving(self, expected: bool) -> None:
        """The sandbox is about to be saved, or is not any more.

        See `Lease.may_be_saved`. And gVisor (2024-07) forgets to watch the input in one copy of fifty.
        """
        self._lease.may_be_saved = expected
        was_looking, self._looks = self._looks > 0, MAX_LOOKS if expected else 0
        if expected and not was_looking:
            self._loop.call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Register the input again: what has arrived is then noticed, also if its event was lost."""
        if self._looks > 0:
            self._looks -= 1
            self._watch_input()
            self._loop.call_later(LOOK_SECONDS, self._look_again)

    def _flush(self) -> None:
        if not self._output.flush():
            self._on_end_of_stream()
        self._update_backpressure()

    def _update_backpressure(self) -> None:
        paused = self._requests.response_bytes + self._output.notification_bytes > HIGH_WATER_BYTES
        self._backpressure.set(paused)

    # input

    def _watch_input(self) -> None:
        self._loop.remove(self._input_fd)
        self._loop.add_reader(self._input_fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._input_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._receive(data)
            return
        self._loop.remove(self._input_fd)
        if self._survive_seconds:
            self._loop.call_later(EMPTY_INPUT_SECONDS, self._watch_input)
        self._on_end_of_stream()

    def _receive(self, data: bytes) -> None:
        for line in self._lines.receive(data):
            if isinstance(line, Control):
                self._on_control(line)
            elif line in (DAMAGED, OVERLONG):
                # Once for every attachment: all lines of a server process that was replaced arrive damaged.
                if not self._reported_loss:
                    self._reported_loss = True
                    self._output.add(b"lost")
            else:
                self._lease.renew()
                self._on_body(line)
        self._requests.begin_waiting()
        self._flush()

    def _on_body(self, body: bytes) -> None:
        if (done := ids_of_body(body, b"done")) is not None:
            self._requests.forget(done)
        elif (pending := ids_of_body(body, b"pending")) is not None:
            self._requests.resume(pending)
        else:
            self._requests.receive(body)

    def _on_control(self, line: Control) -> None:
        if line.kind != b"attach" or len(line.numbers) < 3:
            return
        generation, _, survive_seconds = line.numbers[:3]
        if generation < self.generation:
            # An answer for a server that has been replaced.
            self._output.answer(refused_line(line.nonce, self.generation))
            return
        self.generation, self._survive_seconds = generation, survive_seconds
        self._lose_stream()
        self._lines.begin_reading(line.nonce)
        self._lines.begin_writing(line.nonce)
        self._reported_loss = False
        self._output.answer(attached_line(line.nonce, wire.VERSION))
        self._lease.begin(survive_seconds)
        self._on_attached()

    # the end

    def _lose_stream(self) -> None:
        """What has not been written belongs to a stream that is gone; notifications go with it."""
        self._lines.stream_lost()
        self._output.clear()
        self._update_backpressure()

    def _on_end_of_stream(self) -> None:
        if self._survive_seconds:
            self._lose_stream()
        else:
            self._finish()

    def _finish(self) -> None:
        self._lose_stream()
        self._looks = 0
        self._loop.stop()
