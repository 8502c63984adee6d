"""The stream to a driver: attached, written to, read from, and opened again after it was lost.

It carries the bodies of lines (`decathlon_sandbox.lines`) and knows nothing of requests. Whatever arrives is
handled where it is read, without a task. What the driver sends is not trusted: the length of a line and the
rate at which lines are read are bounded.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from decathlon_sandbox.lines import (
    DAMAGED,
    NONCE_DIGITS,
    OVERLONG,
    Control,
    Lines,
    attach_line,
    body_of_ids,
)
from decathlon_sandbox.rates import TokenBucket

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.streams import DirectStream

SEND_SECONDS = 30.0
"""Time limit for writing one chunk; a driver that does not read for so long is lost."""
ATTACH_SECONDS = 0.2
"""Shortest time between two attachments, because a driver can demand them."""
ANSWER_SECONDS = (2.0, 16.0)
"""How long the driver may take to answer an `attach` before the next one: at first, and after some of them. A
driver that boots on a busy machine takes long, and answers only the last one."""
REOPEN_SECONDS = (0.05, 2.0)
"""Time between attempts to open a stream: at first, and at most."""
ABSENT_SECONDS = 40.0
"""After how long without the driver, and then how often, that is reported. Shorter than the time-outs of
common clients, of which the shortest is a minute."""
DRAIN_SECONDS = 1.0
"""How long a stream that cannot be written to is still read."""
READ_BYTES_PER_SECOND = 16 << 20
READ_BYTES_BURST = 64 << 20
LINE_COST_BYTES = 1 << 10
"""A driver that sends more than this is read slower, so that handling it takes a few per cent of the event
loop's time at most. A line counts as its length and LINE_COST_BYTES, because short lines cost most; what is
sent again at its demand counts too."""

_STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class StreamSource(Protocol):
    """The part of a `Sandbox` that the stream needs."""

    @property
    def stream(self) -> ByteStream: ...

    async def reopen(self) -> None:
        """See `Sandbox.reopen`."""
        ...


class StreamHandler(Protocol):
    """What uses the stream."""

    def pending_ids(self) -> Iterable[int]:
        """The requests whose responses are still needed. The driver is about to be attached."""
        ...

    def on_attached(self) -> None:
        """The driver has been attached: lines can be written."""
        ...

    def on_detached(self) -> None:
        """The driver is not attached any more: lines in both directions may have been lost."""
        ...

    def on_line(self, body: bytes) -> None:
        """The body of a line. Raises ViolationError."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a stream has ended for good.

    `reason`: None if the stream ended without one. `by_driver`: the stream was open, but the driver did not
    read, did not answer or violated the protocol. `cause`: why the sandbox ended, if the provider knows.
    """

    reason: str | None = None
    by_driver: bool = False
    cause: str | None = None


class ViolationError(Exception):
    """The driver has violated the protocol."""


class AttachedClock:
    """A clock that stops from the loss of a stream until the driver is attached to another.

    It also reports a driver that stays away. It does not stop while the driver is attached again over a
    stream that is open: the driver can demand that without end.
    """

    def __init__(self) -> None:
        self.detached_at: float | None = time.monotonic()
        """Since when the clock has been stopped."""
        self._detached_seconds = 0.0
        self._on_absent: Callable[[float], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def detached_seconds(self) -> float:
        """For how long, in all, the clock has been stopped."""
        current = 0.0 if self.detached_at is None else time.monotonic() - self.detached_at
        return self._detached_seconds + current

    def time(self) -> float:
        """Seconds of this clock."""
        return time.monotonic() - self.detached_seconds

    async def wait(self, event: anyio.Event, seconds: float | None) -> bool:
        """Wait for an event; False if it has not come after so many seconds of this clock."""
        deadline = None if seconds is None else self.time() + seconds
        while not event.is_set() and (deadline is None or self.time() < deadline):
            # While the clock is stopped, the rest of the time does not get less.
            with anyio.move_on_after(None if deadline is None else max(deadline - self.time(), 0.01)):
                await event.wait()
        return event.is_set()

    def on_absent(self, listener: Callable[[float], object]) -> None:
        """Call `listener` each ABSENT_SECONDS without the driver, with the seconds since it was attached."""
        self._on_absent = listener
        self._watch()

    def attach(self) -> None:
        if self.detached_at is not None:
            self._detached_seconds += time.monotonic() - self.detached_at
            self.detached_at = None
        self.stop()

    def detach(self) -> None:
        if self.detached_at is None:
            self.detached_at = time.monotonic()
            self._watch()

    def stop(self) -> None:
        """Report nothing any more, until the driver is detached again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        if self._on_absent is not None and self._timer is None and self.detached_at is not None:
            self._timer = asyncio.get_running_loop().call_later(ABSENT_SECONDS, self._report)

    def _report(self) -> None:
        self._timer = None
        if self._on_absent is not None and self.detached_at is not None:
            self._on_absent(time.monotonic() - self.detached_at)
            self._watch()


class DriverStream:
    """The stream of one sandbox. `run` must run in a task, and `attach` be called once.

    `generation`: higher than that of every server process before. `survive_seconds`: how long a lost stream
    is opened again, and how long the driver waits for a server; with 0, the end of the stream is the end.
    `max_read_bytes`: longest message of the driver. `was_attached`: an earlier server process has started the
    driver.
    """

    def __init__(
        self,
        source: StreamSource,
        handler: StreamHandler,
        *,
        generation: int,
        survive_seconds: int,
        max_read_bytes: int,
        was_attached: bool,
    ) -> None:
        self._source = source
        self._stream = source.stream
        self._handler = handler
        self._generation = generation
        self._survive_seconds = survive_seconds
        self.was_attached = was_attached
        """Whether the driver has been attached, also by an earlier server process."""
        self._max_read_bytes = max_read_bytes
        self._lines = Lines(max_read_bytes)
        self._reading = TokenBucket(per_second=READ_BYTES_PER_SECOND, burst=READ_BYTES_BURST)
        self.clock = AttachedClock()
        self.loss: Loss | None = None
        """Why the stream has ended for good; set before `run` returns."""
        self._nonce = b""
        self._attached_at = self._unanswered_since = -math.inf
        self._answer_seconds = ANSWER_SECONDS[0]
        # Lines that the stream has not taken, and bytes that were sent again since the last attachment.
        self._unsent = bytearray()
        self._resent_bytes = 0
        self._is_writing = self._is_quiet = False
        # Whether the stream is open; it is broken if it cannot be written to, and still read.
        self._is_open = True
        self._is_broken = False
        # Whether the last attempt to open it again has succeeded, without an answer from the driver since.
        self._is_unanswered = False
        self._may_attach = self._must_attach = False
        self._work = anyio.Event()
        """Wakes `_maintain`."""
        self._scope: CancelScope | None = None
        self._receive_scope: CancelScope | None = None
        self._write_scope: CancelScope | None = None

    # what its users do

    @property
    def is_attached(self) -> bool:
        return self._lines.reads

    def attach(self) -> None:
        """Begin to attach to the driver, whose source has been written."""
        self._may_attach = self._must_attach = True
        self._work.set()

    def write(self, *bodies: bytes, again: bool = False) -> None:
        """Write lines; dropped unless the driver is attached. `again`: at the driver's demand."""
        if not self._lines.reads:
            return
        lines = [self._lines.frame(body) for body in bodies]
        data = lines[0] if len(lines) == 1 else b"".join(lines)
        if again:
            self._resent_bytes += len(data)
        stream = self._stream
        if (
            isinstance(stream, DirectStream)
            and not self._unsent
            and not (self._is_writing or self._is_quiet or self._is_broken)
        ):
            # Mostly there is room for all of it, and a task costs more than writing.
            try:
                data = data[stream.send_now(data) :]
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._is_broken = True
                self._work.set()
                return
        if data:
            self._unsent += data
            self._work.set()

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no lines, such as the driver's source. `loss` is set if that fails."""
        self._unsent += data
        await self._flush()
        if self._is_broken:
            self.lose(Loss("the sandbox is gone"))

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Write nothing in the body, which should be short; what is sent waits."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
            self._work.set()

    def lose(self, loss: Loss) -> None:
        """End the stream; only the first loss counts."""
        self.loss = self.loss or loss
        self.clock.stop()
        self._lines.stream_lost()
        _cancel(self._write_scope)
        _cancel(self._scope)

    async def run(self) -> None:
        """Receive until the stream has ended for good; then `loss` is set."""
        with CancelScope() as self._scope:
            if self.loss is not None:
                return
            async with background_tasks() as tasks:
                tasks.start_soon(self._maintain)
                while self.loss is None:
                    with CancelScope() as self._receive_scope:
                        loss = await self._receive()
                        if loss is not None:
                            self.lose(loss)
                    if self.loss is None:
                        await self._reopen()
        self.lose(Loss())

    # receiving

    async def _receive(self) -> Loss | None:
        """Receive until the stream ends, or the driver violates the protocol, which is returned."""
        stream = self._stream
        try:
            if isinstance(stream, DirectStream):
                await stream.receive_each(self._handle)
            else:
                while True:
                    if seconds := self._handle(await stream.receive(1 << 16)):
                        await anyio.sleep(seconds)
        except _STREAM_ENDS:
            return None
        except ViolationError as violation:
            return Loss(f"the driver violated the protocol: {violation}", by_driver=True)

    def _handle(self, chunk: bytes) -> float:
        """Handle what has arrived; returns for how long nothing is to be read. Raises ViolationError."""
        for line in self._lines.receive(chunk):
            if isinstance(line, Control):
                self._on_control(line)
            elif line in (DAMAGED, b"lost"):
                self._attach_again()
            elif line == OVERLONG:
                raise ViolationError(f"it sent a line of more than {self._max_read_bytes} bytes")
            else:
                self._handler.on_line(line)
        return self._reading.spend(len(chunk) + LINE_COST_BYTES * chunk.count(b"\n"))

    def _on_control(self, line: Control) -> None:
        """Raises ViolationError."""
        if line.nonce != self._nonce:
            # Another server has attached, or the driver answers late. Attaching again shows which.
            if self._lines.reads:
                self._attach_again()
        elif line.kind == b"refused":
            if line.numbers[0] > self._generation:
                # No other one can have: it would need the state folder, which this one has locked.
                reason = "it says that another server process has taken it over"
                self.lose(Loss(reason, by_driver=True))
        elif line.kind == b"attached" and not self._lines.reads:
            if line.numbers[0] != wire.VERSION:
                raise ViolationError(
                    f"it has wire version {line.numbers[0]}, and this server has {wire.VERSION}"
                )
            self._lines.begin_reading(self._nonce)
            self._must_attach = False
            self.was_attached, self._is_unanswered = True, False
            self._unanswered_since, self._answer_seconds = -math.inf, ANSWER_SECONDS[0]
            self.clock.attach()
            self._handler.on_attached()
            self._work.set()

    def _attach_again(self) -> None:
        self._must_attach = True
        self._work.set()

    async def _reopen(self) -> None:
        """Open the stream again, or set `loss`."""
        was_attached, seconds = self._lines.reads, REOPEN_SECONDS[0]
        self._detach()
        self.clock.detach()
        self._lines.stream_lost()
        self._is_open = self._is_broken = False
        if self._may_attach:
            # Until then the driver's source is written, which is not sent again: it may still arrive.
            _cancel(self._write_scope)
        if not self._survive_seconds:
            self.lose(Loss())
            return
        assert self.clock.detached_at is not None
        deadline = self.clock.detached_at + self._survive_seconds
        while time.monotonic() < deadline:
            if not was_attached:
                await anyio.sleep(seconds)
                seconds = min(2 * seconds, REOPEN_SECONDS[1])
            was_attached = False
            try:
                with anyio.move_on_after(deadline - time.monotonic()) as scope:
                    await self._source.reopen()
            except ProviderUnavailableError:
                self._is_unanswered = False
                continue
            except SandboxLostError as error:
                cause = error.data.get("cause")
                self.lose(Loss(error.message, cause=cause if isinstance(cause, str) else None))
                return
            if not scope.cancelled_caught:
                self._stream = self._source.stream
                self._is_open = self._is_unanswered = True
                self._unanswered_since = -math.inf
                self._must_attach = self._may_attach
                self._work.set()
                return
        # A driver can end each of its streams.
        reason = f"its stream could not be opened again within {self._survive_seconds} s"
        self.lose(Loss(reason, by_driver=self._is_unanswered))

    # attaching and writing

    async def _maintain(self) -> None:
        """Attach, and write what the stream did not take at once."""
        while True:
            await self._next_work()
            if self._is_broken:
                await self._drop_broken_stream()
            elif self._is_open and self._must_attach:
                await self._attach()
            elif self._is_open:
                await self._flush()

    async def _next_work(self) -> None:
        await self._work.wait()
        self._work = anyio.Event()

    async def _attach(self) -> None:
        """Attach once, and wait for the answer."""
        stream = self._stream
        seconds = self._reading.spend(self._resent_bytes)
        await anyio.sleep(max(seconds, self._attached_at + ATTACH_SECONDS - time.monotonic()))
        if not self._is_usable(stream):
            self._work.set()
            return
        self._attached_at = time.monotonic()
        if self._unanswered_since < 0:
            self._unanswered_since = self._attached_at
        self._detach()
        self._nonce = secrets.token_hex(NONCE_DIGITS // 2).encode()
        self._lines.begin_writing(self._nonce)
        pending = body_of_ids(b"pending", self._handler.pending_ids())
        # What was not written was for the attachment before.
        self._unsent[:] = attach_line(self._nonce, self._generation, wire.VERSION, self._survive_seconds)
        self._unsent += self._lines.frame(pending)
        self._resent_bytes = 0
        await self._flush()
        with anyio.move_on_after(self._answer_seconds):
            while self._is_usable(stream) and not self._lines.reads:
                await self._next_work()
                await self._flush()
        self._work.set()
        if self._is_usable(stream) and not self._lines.reads:
            self._answer_seconds = min(2 * self._answer_seconds, ANSWER_SECONDS[1])
            # The first time, the driver has the time of its boot.
            if self.was_attached and time.monotonic() > self._unanswered_since + wire.LEASE_SECONDS:
                self.lose(Loss(f"the driver has not answered for {wire.LEASE_SECONDS:.0f} s", by_driver=True))

    def _detach(self) -> None:
        if self._lines.reads:
            self._lines.stop_reading()
            self._handler.on_detached()

    def _is_usable(self, stream: ByteStream) -> bool:
        return stream is self._stream and self._is_open and not self._is_broken

    async def _flush(self) -> None:
        """Write what there is, unless another task does."""
        while self._unsent and not (self._is_writing or self._is_quiet or self._is_broken):
            stream, data = self._stream, bytes(self._unsent)
            self._unsent.clear()
            self._is_writing, is_stalled = True, False
            try:
                # Shielded: after a part of a line, everything would have to be sent again.
                with anyio.move_on_after(SEND_SECONDS, shield=True) as self._write_scope:
                    await stream.send(data)
                is_stalled = self._write_scope.cancelled_caught
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                # Its end, which says more, is still to be read.
                if stream is self._stream:
                    self._is_broken = True
                    self._work.set()
            finally:
                self._is_writing = False
            if is_stalled and stream is self._stream and self._is_open and self.loss is None:
                reason = f"the sandbox has not read its input for {SEND_SECONDS:.0f} s"
                self.lose(Loss(reason, by_driver=True))

    async def _drop_broken_stream(self) -> None:
        """End a stream that cannot be written to, after what can still be read."""
        with anyio.move_on_after(DRAIN_SECONDS):
            while self._is_broken:
                await self._next_work()
        if self._is_broken:
            _cancel(self._receive_scope)
        else:
            self._work.set()  # to attach to the next one


def _cancel(scope: CancelScope | None) -> None:
    if scope is not None:
        scope.cancel()
