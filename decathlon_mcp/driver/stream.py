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
from dataclasses import dataclass, field
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

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.pending import Survival
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
        self._detached_at: float | None = time.monotonic()
        """Since when the clock has been stopped."""
        self._stopped_seconds = 0.0
        """For how long, in all, it was stopped before."""
        self._on_absent: Callable[[float], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def absent_seconds(self) -> float:
        """For how long the driver has not been attached; 0 if it is."""
        return 0.0 if self._detached_at is None else time.monotonic() - self._detached_at

    def time(self) -> float:
        """Seconds of this clock."""
        return time.monotonic() - self._stopped_seconds - self.absent_seconds

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
        self._stopped_seconds += self.absent_seconds
        self._detached_at = None
        self.stop()

    def detach(self) -> None:
        if self._detached_at is None:
            self._detached_at = time.monotonic()
            self._watch()

    def stop(self) -> None:
        """Report nothing any more, until the driver is detached again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        if self._on_absent is not None and self._timer is None and self._detached_at is not None:
            self._timer = asyncio.get_running_loop().call_later(ABSENT_SECONDS, self._report, self._on_absent)

    def _report(self, listener: Callable[[float], object]) -> None:
        self._timer = None
        listener(self.absent_seconds)
        self._watch()


class Writer:
    """Writes to one stream, in order. What the stream does not take at once, `flush` writes.

    `wake`: called when there is something to flush, or the stream is broken.
    """

    def __init__(self, stream: ByteStream, wake: Callable[[], object]) -> None:
        self.stream = stream
        self.is_broken = False
        """Whether the stream cannot be written to; it may still be read."""
        self.is_stalled = False
        """Whether it is broken because it has taken nothing for SEND_SECONDS."""
        self._wake = wake
        self._unsent = bytearray()
        self._scope: CancelScope | None = None
        """Of a write in progress."""

    def write(self, data: bytes, *, later: bool) -> None:
        """Write what the stream takes now, unless it is to be written `later`."""
        stream = self.stream
        is_idle = not (self._unsent or self._scope or self.is_broken)
        if is_idle and not later and isinstance(stream, DirectStream):
            # Mostly there is room for all of it, and a task costs more than writing.
            try:
                data = data[stream.send_now(data) :]
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.is_broken = True
                self._wake()
                return
        if data:
            self._unsent += data
            self._wake()

    async def flush(self, data: bytes = b"") -> None:
        """Write what there is, and this, unless another task does."""
        self._unsent += data
        while self._unsent and not (self._scope or self.is_broken):
            data = bytes(self._unsent)
            self._unsent.clear()
            try:
                # Shielded: after a part of a line, everything would have to be sent again.
                with anyio.move_on_after(SEND_SECONDS, shield=True) as self._scope:
                    await self.stream.send(data)
                if self._scope.cancelled_caught and not self.is_broken:
                    self.is_broken = self.is_stalled = True
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.is_broken = True
                self._wake()
            finally:
                self._scope = None

    def discard(self) -> None:
        """Forget what has not been written."""
        self._unsent.clear()

    def close(self) -> None:
        """Write nothing more; a write in progress ends."""
        self.is_broken = True
        if self._scope is not None:
            self._scope.cancel()


@dataclass(slots=True)
class Attaching:
    """The newest attachment, and when there may be another."""

    nonce: bytes = b""
    is_due: bool = True
    began_at: float = -math.inf
    unanswered_since: float = -math.inf
    """When the first `attach` was sent that the driver has not answered on this stream."""
    answer_seconds: float = field(default_factory=lambda: ANSWER_SECONDS[0])
    resent_bytes: int = 0
    """What was sent again at the driver's demand since the last `attach`."""


class DriverStream:
    """The stream of one sandbox. `run` must run in a task, and `attach` be called once.

    `max_read_bytes`: longest message of the driver. `was_attached`: an earlier server process has started the
    driver.
    """

    def __init__(
        self,
        source: StreamSource,
        handler: StreamHandler,
        survival: Survival,
        *,
        max_read_bytes: int,
        was_attached: bool,
    ) -> None:
        self._source = source
        self._handler = handler
        self._survival = survival
        self.was_attached = was_attached
        """Whether the driver has been attached, also by an earlier server process."""
        self.clock = AttachedClock()
        self.loss: Loss | None = None
        """Why the stream has ended for good; set before `run` returns."""
        self._lines = Lines(max_read_bytes)
        self._reading = wire.TokenBucket(per_second=READ_BYTES_PER_SECOND, burst=READ_BYTES_BURST)
        self._work = anyio.Event()
        """Wakes `_maintain`."""
        self._writer = Writer(source.stream, self._wake)
        self._attaching: Attaching | None = None
        """None until `attach`."""
        self._is_unanswered = False
        """Whether the stream was opened again, without an answer from the driver since."""
        self._is_quiet = False
        self._scope: CancelScope | None = None

    # what its users do

    @property
    def is_attached(self) -> bool:
        return self._lines.reads

    def attach(self) -> None:
        """Begin to attach to the driver, whose source has been written."""
        self._attaching = Attaching()
        self._wake()

    def write(self, *bodies: bytes, again: bool = False) -> None:
        """Write lines; dropped unless the driver is attached. `again`: at the driver's demand."""
        if not self._lines.reads:
            return
        lines = [self._lines.frame(body) for body in bodies]
        data = lines[0] if len(lines) == 1 else b"".join(lines)
        if again and self._attaching is not None:
            self._attaching.resent_bytes += len(data)
        self._writer.write(data, later=self._is_quiet)

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no lines, such as the driver's source. `loss` is set if that fails."""
        writer = self._writer
        await writer.flush(data)
        if writer.is_broken:
            self.lose(_stall() if writer.is_stalled else Loss("the sandbox is gone"))

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Write nothing in the body, which should be short; what is sent waits."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
            self._wake()

    def lose(self, loss: Loss) -> None:
        """End the stream; only the first loss counts."""
        self.loss = self.loss or loss
        self.clock.stop()
        self._lines.stream_lost()
        self._writer.close()
        if self._scope is not None:
            self._scope.cancel()

    async def run(self) -> None:
        """Receive until the stream has ended for good; then `loss` is set."""
        with CancelScope() as self._scope:
            while self.loss is None:
                async with background_tasks() as tasks:
                    tasks.start_soon(self._maintain, self._writer, tasks.cancel_scope)
                    if (loss := await self._receive(self._writer.stream)) is not None:
                        self.lose(loss)
                    if self._attaching is not None:
                        # Until then the driver's source is written, which is not sent again.
                        self._writer.close()
                if self.loss is None:
                    await self._reopen()
        self.lose(Loss())

    def _wake(self) -> None:
        self._work.set()

    # receiving

    async def _receive(self, stream: ByteStream) -> Loss | None:
        """Receive until the stream ends, or the driver violates the protocol, which is returned."""
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
                raise ViolationError(f"it sent a line of more than {self._lines.max_bytes} bytes")
            else:
                self._handler.on_line(line)
        return self._reading.spend(len(chunk) + LINE_COST_BYTES * chunk.count(b"\n"))

    def _on_control(self, line: Control) -> None:
        """Raises ViolationError."""
        attaching = self._attaching
        if attaching is None or line.nonce != attaching.nonce:
            # Another server has attached, or the driver answers late. Attaching again shows which.
            if self._lines.reads:
                self._attach_again()
        elif line.kind == b"refused":
            if line.numbers[0] > self._survival.generation:
                # No other one can have: it would need the state folder, which this one has locked.
                reason = "it says that another server process has taken it over"
                self.lose(Loss(reason, by_driver=True))
        elif line.kind == b"attached" and not self._lines.reads:
            if line.numbers[0] != wire.VERSION:
                raise ViolationError(
                    f"it has wire version {line.numbers[0]}, and this server has {wire.VERSION}"
                )
            self._lines.begin_reading(attaching.nonce)
            attaching.is_due = False
            attaching.unanswered_since, attaching.answer_seconds = -math.inf, ANSWER_SECONDS[0]
            self.was_attached, self._is_unanswered = True, False
            self.clock.attach()
            self._handler.on_attached()
            self._wake()

    def _attach_again(self) -> None:
        if self._attaching is not None:
            self._attaching.is_due = True
            self._wake()

    async def _reopen(self) -> None:
        """Open the stream again, or set `loss`."""
        was_attached, pause = self._lines.reads, REOPEN_SECONDS[0]
        self._detach()
        self.clock.detach()
        self._lines.stream_lost()
        if not self._survival.seconds:
            self.lose(Loss())
            return
        deadline = time.monotonic() + self._survival.seconds - self.clock.absent_seconds
        while time.monotonic() < deadline:
            if not was_attached:
                await anyio.sleep(pause)
                pause = min(2 * pause, REOPEN_SECONDS[1])
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
                self._writer = Writer(self._source.stream, self._wake)
                self._is_unanswered = True
                if self._attaching is not None:
                    self._attaching.unanswered_since = -math.inf
                self._attach_again()
                return
        # A driver can end each of its streams.
        reason = f"its stream could not be opened again within {self._survival.seconds} s"
        self.lose(Loss(reason, by_driver=self._is_unanswered))

    # attaching and writing

    async def _maintain(self, writer: Writer, stream_scope: CancelScope) -> None:
        """Attach, and write what the stream did not take at once; end a stream that is broken."""
        while not writer.is_broken:
            if not self._is_quiet:
                if self._attaching is not None and self._attaching.is_due:
                    await self._attach(writer, self._attaching)
                    continue
                await writer.flush()
            await self._next_work()
        if writer.is_stalled:
            self.lose(_stall())
        # Its end, which says more, is still to be read.
        await anyio.sleep(DRAIN_SECONDS)
        stream_scope.cancel()

    async def _next_work(self) -> None:
        await self._work.wait()
        self._work = anyio.Event()

    async def _attach(self, writer: Writer, attaching: Attaching) -> None:
        """Attach once, and wait for the answer."""
        seconds = self._reading.spend(attaching.resent_bytes)
        await anyio.sleep(max(seconds, attaching.began_at + ATTACH_SECONDS - time.monotonic()))
        if not attaching.is_due:
            return  # the answer to the one before came late
        self._detach()
        attaching.began_at, attaching.resent_bytes = time.monotonic(), 0
        if attaching.unanswered_since < 0:
            attaching.unanswered_since = attaching.began_at
        nonce = attaching.nonce = secrets.token_hex(NONCE_DIGITS // 2).encode()
        self._lines.begin_writing(nonce)
        pending = body_of_ids(b"pending", self._handler.pending_ids())
        writer.discard()  # it was for the attachment before
        attach = attach_line(nonce, self._survival.generation, wire.VERSION, self._survival.seconds)
        await writer.flush(attach + self._lines.frame(pending))
        with anyio.move_on_after(attaching.answer_seconds):
            while not (writer.is_broken or self._lines.reads):
                await self._next_work()
                if not self._is_quiet:
                    await writer.flush()
        if not (writer.is_broken or self._lines.reads):
            attaching.answer_seconds = min(2 * attaching.answer_seconds, ANSWER_SECONDS[1])
            # The first time, the driver has the time of its boot.
            if self.was_attached and time.monotonic() > attaching.unanswered_since + wire.LEASE_SECONDS:
                self.lose(Loss(f"the driver has not answered for {wire.LEASE_SECONDS:.0f} s", by_driver=True))

    def _detach(self) -> None:
        if self._lines.reads:
            self._lines.stop_reading()
            self._handler.on_detached()


def _stall() -> Loss:
    return Loss(f"the sandbox has not read its input for {SEND_SECONDS:.0f} s", by_driver=True)
