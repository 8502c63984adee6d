"""The driver's connection to the server: lines, kept responses, backpressure, and the lease.

The stream can be lost: bytes from the server stop, and bytes to it go nowhere. Responses are kept until the
server does not need them any more, which may be another server process. Nothing else is: a notification that
is written while no server is attached is dropped.
"""

from __future__ import annotations

import collections
import os
import time

from decathlon_sandbox import wire
from decathlon_sandbox.lines import (
    DAMAGED,
    OVERLONG,
    Control,
    Lines,
    attached_line,
    body_of_ids,
    ids_of_body,
    refused_line,
)
from decathlon_sandbox.log import log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from decathlon_sandbox.event_loop import EventLoop, Timer
    from decathlon_sandbox.streams import Backpressure

    class ConnectionHandler(Protocol):
        """What the connection reports to."""

        def on_attached(self) -> None:
            """A server has attached, the same process or another. Called before what it sends."""
            ...

        def on_pending(self, ids: list[int]) -> list[int]:
            """The server waits for these requests only; returns those that have never come."""
            ...

        def on_message(self, payload: bytes) -> None:
            """A message from the server."""
            ...

        def on_room(self) -> None:
            """The server may have done with responses."""
            ...

        def on_end(self) -> None:
            """No server will come any more, or the connection cannot continue."""
            ...


OVERHEAD_BYTES = 100
"""Counted for every response in addition to its length, so that many short ones are bounded too. About what
an entry of a dictionary, its key and the header of a `bytes` object occupy."""
HIGH_WATER_BYTES = 8 << 20
"""Backpressure begins at so many bytes that the server may still need: twice the largest usual reply."""
RESERVED_BYTES = 2 * HIGH_WATER_BYTES
"""Part of RESPONSE_BUFFER_BYTES that responses to large requests do not use: for the data of tunnels, which
stops at HIGH_WATER_BYTES, for other notifications, and for small responses such as those to `ping`."""
EMPTY_INPUT_SECONDS = 0.2
"""How often an input at its end is read again. A FIFO can get another writer."""
LOOK_SECONDS = 0.25
MAX_LOOKS = 240
"""How often, and how many times, the input is registered again while the sandbox may be a copy: a minute."""
_CHUNK_BYTES = 1 << 16


def _lease_seconds() -> float:
    try:
        return float(os.environ[wire.LEASE_VARIABLE])
    except (KeyError, ValueError):
        return wire.LEASE_SECONDS


class Connection:
    """Sends and receives messages over two descriptors, which it owns.

    `backpressure` is paused while more than HIGH_WATER_BYTES are kept or not written.
    """

    def __init__(
        self,
        loop: EventLoop,
        input_fd: int,
        output_fd: int,
        handler: ConnectionHandler,
        backpressure: Backpressure,
    ) -> None:
        self._loop = loop
        self._input_fd = input_fd
        self._output_fd = output_fd
        self._handler = handler
        self._backpressure = backpressure
        self._lines = Lines(wire.MAX_LINE_BYTES)
        self.generation = -1
        """The generation of the server process that is attached; -1 before the first."""
        self._survive_seconds = 0
        self._reported_loss = False
        # Responses that the server may need again, by request; bodies that are not written, which are
        # responses or notifications; and the size of the responses and of the notifications among them.
        self._responses: dict[int, bytes] = {}
        self._queue: collections.deque[tuple[bytes, bool]] = collections.deque()
        self._held_bytes = 0
        self._output = memoryview(b"")
        self._watching_output = False
        self._first_lease_seconds = _lease_seconds()
        self._heard_at = time.monotonic()
        self._lease_timer: Timer | None = None
        # Whether the sandbox is about to be saved, and how often the input is still registered again.
        self._may_be_saved = False
        self._looks = 0
        self._ended = False
        for fd in (input_fd, output_fd):
            os.set_blocking(fd, False)

    def start(self) -> None:
        self._watch_input()
        self._check_lease()

    # what the driver sends

    @property
    def free_bytes(self) -> int:
        """How much of RESPONSE_BUFFER_BYTES is not used; every response takes OVERHEAD_BYTES more."""
        return wire.RESPONSE_BUFFER_BYTES - self._held_bytes

    def respond(self, request_id: int, payload: bytes) -> None:
        """Send a response, and keep it until the server is done with it. The caller has reserved the room."""
        self._responses[request_id] = payload
        self._held_bytes += len(payload) + OVERHEAD_BYTES
        self._send(payload, is_notification=False)

    def has_response(self, request_id: int) -> bool:
        """Whether the response to a request is kept."""
        return request_id in self._responses

    def notify(self, payload: bytes) -> None:
        """Send a notification, or a response to nothing that is known; dropped if no server is attached."""
        if self._lines.reads:
            self._held_bytes += len(payload)
            self._send(payload, is_notification=True)

    def expect_saving(self, expected: bool) -> None:
        """The sandbox is about to be saved, or is not any more.

        In a copy of it, the clock shows the time that has passed since then, in which no server could be
        heard: the lease begins again. And gVisor (2024-07) forgets to watch the input in one copy of fifty.
        """
        self._may_be_saved = expected
        was_looking, self._looks = self._looks > 0, MAX_LOOKS if expected else 0
        if expected and not was_looking:
            self._loop.call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Register the input again: what has arrived is then noticed, also if its event was lost."""
        if self._looks > 0 and not self._ended:
            self._looks -= 1
            self._watch_input()
            self._loop.call_later(LOOK_SECONDS, self._look_again)

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
            self._lose_stream()
            self._loop.call_later(EMPTY_INPUT_SECONDS, self._watch_input)
        else:
            self._finish()

    def _receive(self, data: bytes) -> None:
        for line in self._lines.receive(data):
            if isinstance(line, Control):
                self._on_control(line)
            elif line in (DAMAGED, OVERLONG):
                self._report_loss()
            else:
                self._heard_at = time.monotonic()
                self._on_body(line)
            if self._ended:
                return
        self._handler.on_room()
        self._flush()

    def _on_body(self, body: bytes) -> None:
        if (done := ids_of_body(body, b"done")) is not None:
            for request_id in done:
                self._forget(request_id)
        elif (pending := ids_of_body(body, b"pending")) is not None:
            self._resume(pending)
        else:
            self._handler.on_message(body)

    def _report_loss(self) -> None:
        # Once for every attachment: all lines of a server process that was replaced arrive as damaged ones.
        if not self._reported_loss:
            self._reported_loss = True
            self._queue.append((b"lost", False))

    # attaching

    def _on_control(self, line: Control) -> None:
        if line.kind != b"attach" or len(line.numbers) < 3:
            return
        generation, _, survive_seconds = line.numbers[:3]
        if generation < self.generation:
            # Not while something is written: this answer is for a server that has been replaced.
            if not self._output:
                self._output = memoryview(refused_line(line.nonce, self.generation))
            return
        self.generation, self._survive_seconds = generation, survive_seconds
        self._lose_stream()
        self._lines.begin_reading(line.nonce)
        self._lines.begin_writing(line.nonce)
        self._reported_loss = False
        self._heard_at = time.monotonic()
        self._output = memoryview(attached_line(line.nonce, wire.VERSION))
        self._check_lease()
        self._handler.on_attached()

    def _resume(self, pending: list[int]) -> None:
        """Send the kept responses that the server waits for, and forget all others."""
        unknown = self._handler.on_pending(pending)
        self._queue.append((body_of_ids(b"unknown", unknown), False))
        waited_for = set(pending)
        for request_id, payload in tuple(self._responses.items()):
            if request_id in waited_for:
                self._queue.append((payload, False))
            else:
                self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        payload = self._responses.pop(request_id, None)
        if payload is not None:
            self._held_bytes -= len(payload) + OVERHEAD_BYTES

    def _lose_stream(self) -> None:
        """What has not been written belongs to a stream that is gone; notifications go with it."""
        self._lines.stream_lost()
        self._output = memoryview(b"")
        self._held_bytes -= sum(len(payload) for payload, is_notification in self._queue if is_notification)
        self._queue.clear()
        self._update_backpressure()

    # output

    def _send(self, payload: bytes, *, is_notification: bool) -> None:
        if self._lines.reads:
            self._queue.append((payload, is_notification))
            self._flush()
        self._update_backpressure()

    def _flush(self) -> None:
        """Write what there is until the descriptor accepts no more."""
        while not self._ended:
            if not self._output:
                self._output = memoryview(self._next_lines())
                if not self._output:
                    break
            try:
                written = os.write(self._output_fd, self._output)
            except BlockingIOError:
                break
            except OSError:
                self._on_broken_output()
                break
            self._output = self._output[written:]
        watch = bool(self._output) and not self._ended
        if watch and not self._watching_output:
            self._loop.add_writer(self._output_fd, self._flush)
        elif self._watching_output and not watch:
            self._loop.remove(self._output_fd)
        self._watching_output = watch
        self._update_backpressure()

    def _next_lines(self) -> bytes:
        lines: list[bytes] = []
        size_bytes = 0
        while self._queue and size_bytes < _CHUNK_BYTES:
            payload, is_notification = self._queue.popleft()
            if is_notification:
                self._held_bytes -= len(payload)
            lines.append(self._lines.frame(payload))
            size_bytes += len(payload)
        return b"".join(lines)

    def _on_broken_output(self) -> None:
        if self._survive_seconds:
            self._lose_stream()
        else:
            self._finish()

    def _update_backpressure(self) -> None:
        if self._held_bytes > HIGH_WATER_BYTES:
            self._backpressure.pause()
        else:
            self._backpressure.resume()

    # the end

    def _check_lease(self) -> None:
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        limit_seconds = self._survive_seconds or self._first_lease_seconds
        remaining = self._heard_at + limit_seconds - time.monotonic()
        if remaining <= 0 and self._may_be_saved:
            self._may_be_saved = False
            self._heard_at, remaining = time.monotonic(), limit_seconds
        if remaining > 0:
            self._lease_timer = self._loop.call_later(remaining, self._check_lease)
        else:
            log(f"decathlon: nothing received for {limit_seconds:g} s, the driver exits")
            self._finish()

    def _finish(self) -> None:
        self._ended = True
        self._handler.on_end()
