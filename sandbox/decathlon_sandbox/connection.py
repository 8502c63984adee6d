"""The driver's connection to the server: messages over stdin and stdout, backpressure, and the lease.

The stream can be lost: bytes from the server stop, and bytes to it go nowhere. Messages are kept until a
server attaches again, which can be another process.
"""

from __future__ import annotations

import os
import time

from decathlon_sandbox import wire
from decathlon_sandbox.log import log
from decathlon_sandbox.resumable import (
    ACKNOWLEDGE_AFTER_SECONDS,
    ConnectionFullError,
    DriverEnd,
    Limits,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from decathlon_sandbox.event_loop import EventLoop, Timer
    from decathlon_sandbox.streams import Backpressure

    class ConnectionHandler(Protocol):
        """What the connection reports to."""

        def on_message(self, number: int, payload: bytes) -> None:
            """A message from the server. It is acknowledged by `Connection.acknowledge`."""
            ...

        def on_new_server(self) -> None:
            """Another server process has attached. Called before the messages that came with it."""
            ...

        def on_room(self) -> None:
            """The server may have acknowledged messages."""
            ...

        def on_end(self) -> None:
            """No server will come any more, or the connection cannot continue."""
            ...


LIMITS = Limits(
    # A response contains a message of a task's server, which can be as long as one of the server's.
    send_payload_bytes=wire.MAX_LINE_BYTES + wire.RESPONSE_MARGIN_BYTES,
    send_buffer_bytes=wire.RESPONSE_BUFFER_BYTES,
    receive_payload_bytes=wire.MAX_LINE_BYTES,
    receive_window_bytes=wire.REQUEST_BUFFER_BYTES,
)
HIGH_WATER_BYTES = 8 << 20
"""Backpressure begins at so many bytes that the server has not acknowledged: twice the largest usual
reply."""
RESERVED_BYTES = 2 * HIGH_WATER_BYTES
"""Part of the send buffer that responses to large requests do not use: for the data of tunnels, which stops
at HIGH_WATER_BYTES, for other notifications, and for small responses such as those to `ping`."""
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

    `backpressure` is paused while more than HIGH_WATER_BYTES are not acknowledged.
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
        self._end = DriverEnd(LIMITS)
        self._output = memoryview(b"")
        self._watching_output = False
        self._acknowledging: Timer | None = None
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

    @property
    def generation(self) -> int:
        """The generation of the server process that is attached."""
        return self._end.generation

    @property
    def room_bytes(self) -> int:
        """Size of the largest message that `send` accepts."""
        return self._end.room_bytes

    @property
    def free_bytes(self) -> int:
        """The part of the send buffer that is not used; every message takes OVERHEAD_BYTES more."""
        return LIMITS.send_buffer_bytes - self._end.unacknowledged_bytes

    def is_acknowledged(self, number: int) -> bool:
        """Whether the server has acknowledged the message that `send` gave this number."""
        return number < self._end.first_unacknowledged

    def send(self, payload: bytes) -> int:
        """Send a message, now or when a server is attached, and return its number.

        Ends the driver if it is longer than `room_bytes`: callers reserve the room or look at it first.
        """
        try:
            number = self._end.send(payload)
        except ConnectionFullError as error:
            log(f"decathlon: a message cannot be sent, the driver exits: {error}")
            self._finish()
            return 0
        self._flush()
        self._update_backpressure()
        return number

    def acknowledge(self, number: int) -> None:
        """Let the server forget a message, because it has been handled or its work has begun."""
        self._end.acknowledge(number)
        self._schedule_acknowledgement()

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
        if self._end.survive_seconds:
            self._end.stream_lost()
            self._loop.call_later(EMPTY_INPUT_SECONDS, self._watch_input)
        else:
            self._finish()

    def _receive(self, data: bytes) -> None:
        end = self._end
        generation, attachments, valid_lines = end.generation, end.attachments, end.valid_lines
        messages = end.receive(data)
        if end.failure is not None:
            log(f"decathlon: the server broke the protocol: {end.failure}")
            self._finish()
            return
        if end.valid_lines != valid_lines:
            self._heard_at = time.monotonic()
        if end.attachments != attachments:
            # It belongs to the stream before. The driver's answer begins with a line feed.
            self._output = memoryview(b"")
            self._check_lease()
        if end.generation != generation:
            self._handler.on_new_server()
        for number, payload in messages:
            self._handler.on_message(number, payload)
        self._handler.on_room()
        self._flush()
        self._update_backpressure()
        self._schedule_acknowledgement()

    # output

    def _flush(self) -> None:
        """Write what there is until the descriptor accepts no more."""
        while not self._ended:
            if not self._output:
                self._output = memoryview(self._end.data_to_send())
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

    def _on_broken_output(self) -> None:
        self._output = memoryview(b"")
        if self._end.survive_seconds:
            self._end.stream_lost()
        else:
            self._finish()

    def _update_backpressure(self) -> None:
        if self._end.unacknowledged_bytes > HIGH_WATER_BYTES:
            self._backpressure.pause()
        else:
            self._backpressure.resume()

    def _schedule_acknowledgement(self) -> None:
        if self._end.acknowledgement_pending and self._acknowledging is None:
            self._acknowledging = self._loop.call_later(ACKNOWLEDGE_AFTER_SECONDS, self._acknowledge_now)

    def _acknowledge_now(self) -> None:
        self._acknowledging = None
        self._end.acknowledge_now()
        self._flush()

    # the end

    def _check_lease(self) -> None:
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        limit_seconds = self._end.survive_seconds or self._first_lease_seconds
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
