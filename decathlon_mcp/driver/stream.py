"""The stream to a driver: attached, written to, read from, and opened again after it was lost.

It carries the bodies of lines (`decathlon_sandbox.lines`) and knows nothing of requests. What the driver
sends is not trusted: the length of a line and the rate at which lines are read are bounded. A driver that
does not read what is written to it does not answer either: the heartbeat (`link.Heartbeat`) finds it.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

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

from decathlon_mcp.background import Flag, background_tasks
from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.sandboxes.streams import DirectStream

ATTACH_SECONDS = 0.2
"""Shortest time between two attachments, because a driver can demand them."""
ANSWER_SECONDS = (2.0, 16.0)
"""How long the driver may take to answer an `attach` before the next one: at first, and after some of them. A
driver that boots on a busy machine takes long, and answers only the last one."""
REOPEN_SECONDS = (0.05, 2.0)
"""Time between attempts to open a stream: at first, and at most."""
DRAIN_SECONDS = 1.0
"""How long a stream that cannot be written to is still read."""
READ_BYTES_PER_SECOND = 16 << 20
READ_BYTES_BURST = 64 << 20
LINE_COST_BYTES = 1 << 10
"""A driver that sends more than this is read slower, so that handling it takes a few per cent of the event
loop's time at most. A line counts as its length and LINE_COST_BYTES, because short lines cost most; what is
sent again at its demand counts too."""
MAX_UNSENT_BYTES = 2 * wire.REQUEST_BUFFER_BYTES
"""What may wait to be written. A driver that reads nothing can answer pings, whose ids it guesses, and cause
lines, such as notes that its replies are not needed."""
COPIES_OF_COPIES = 256
"""Generations of one server process. A request's id is longer by so many bits."""

_STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """How a link continues after the loss of a stream or of a server process.

    `seconds`: how long the driver waits for a server, and a server for a new stream; with 0, the end of the
    stream is the end. `generation`: higher than every earlier server process's, from 1. To a driver, a copy
    of its sandbox that is opened is another server process.
    """

    seconds: int = 0
    generation: int = 1

    @classmethod
    def of_server(cls, seconds: int, start: int) -> Self:
        """`start`: number of the server process, from 1. It has room for copies of copies."""
        return cls(seconds, start * COPIES_OF_COPIES)


NO_RECONNECTION = ReconnectPolicy()


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a stream has ended for good.

    `reason`: None if the stream ended without one. `by_driver`: the stream was open, but the driver did not
    answer or violated the protocol. `cause`: why the sandbox ended, if the provider knows.
    """

    reason: str | None = None
    by_driver: bool = False
    cause: str | None = None


class ViolationError(Exception):
    """The driver has violated the protocol."""


class AttachedClock:
    """A clock that stops from the loss of a stream until the driver is attached to another.

    It does not stop while the driver is attached again over a stream that is open: the driver can demand that
    without end.
    """

    def __init__(self) -> None:
        self.on_absent: Callable[[float], object] = lambda seconds: None
        """Called from time to time while the driver is not attached, with the seconds since it was."""
        self._detached_at: float | None = time.monotonic()
        """Since when the clock has been stopped."""
        self._stopped_seconds = 0.0
        """For how long, in all, it was stopped before."""

    @property
    def absent_seconds(self) -> float:
        """For how long the driver has not been attached; 0 if it is."""
        return 0.0 if self._detached_at is None else time.monotonic() - self._detached_at

    def time(self) -> float:
        """Seconds of this clock."""
        return time.monotonic() - self._stopped_seconds - self.absent_seconds

    async def wait(self, flag: Flag, seconds: float | None) -> bool:
        """Wait for a flag; False if it was not set within so many seconds of this clock."""
        deadline = None if seconds is None else self.time() + seconds
        while not flag.is_set() and (deadline is None or self.time() < deadline):
            # While the clock is stopped, the rest of the time does not get less.
            with anyio.move_on_after(None if deadline is None else max(deadline - self.time(), 0.01)):
                await flag.wait()
        return flag.is_set()

    def attach(self) -> None:
        self._stopped_seconds += self.absent_seconds
        self._detached_at = None

    def detach(self) -> None:
        self._detached_at = self._detached_at or time.monotonic()


@dataclass(slots=True)
class Attaching:
    """The newest attachment. `is_due`: the driver has not answered it, or there must be another."""

    nonce: bytes = b""
    is_due: bool = False
    began_at: float = 0.0
    resent_bytes: int = 0
    """What was sent again at the driver's demand since."""


class DriverStream(ABC):
    """The stream of one sandbox. `receive` must run in a task, and `attach` be called once.

    `was_attached`: the driver has been attached, also by an earlier server process.
    """

    def __init__(self, sandbox: Sandbox, reconnect: ReconnectPolicy, *, was_attached: bool) -> None:
        self.reconnect = reconnect
        self.was_attached = was_attached
        self.clock = AttachedClock()
        self._sandbox, self._stream = sandbox, sandbox.stream
        self._loss: Loss | None = None
        """Why the stream has ended for good; set before `receive` returns."""
        self._lines = Lines(wire.MAX_RESPONSE_BYTES)
        self._reading = wire.TokenBucket(per_second=READ_BYTES_PER_SECOND, burst=READ_BYTES_BURST)
        self._attaching = Attaching()
        self._unsent = bytearray()
        """What the stream did not take at once."""
        self._is_writing = False
        self._is_quiet = False
        self._work = anyio.Event()
        """Wakes `_maintain`."""
        self._is_unanswered = False
        """Whether the stream was opened again, without an answer from the driver since."""
        self._scope: CancelScope | None = None

    @abstractmethod
    def _pending_ids(self) -> Iterable[int]:
        """The requests whose responses are still needed. The driver is about to be attached."""

    @abstractmethod
    def _on_attached(self) -> None:
        """The driver has been attached: lines can be written."""

    @abstractmethod
    def _on_detached(self) -> None:
        """The driver is not attached any more: lines in both directions may have been lost."""

    @abstractmethod
    def _on_line(self, body: bytes) -> None:
        """The body of a line. Raises ViolationError."""

    @property
    def is_attached(self) -> bool:
        return self._lines.reads

    def attach(self) -> None:
        """Begin to attach to the driver, whose source has been written."""
        self._attaching.is_due = True
        self._work.set()

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Write nothing in the body, which should be short; what is sent waits."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
            self._work.set()

    async def receive(self) -> None:
        """Receive until the stream has ended for good."""
        with CancelScope() as self._scope:
            while self._loss is None:
                self._stream = self._sandbox.stream
                async with background_tasks() as tasks:
                    tasks.start_soon(self._maintain, tasks.cancel_scope)
                    await self._receive_stream(self._stream)
                if self._loss is None:
                    await self._reopen()
        self._lose(Loss())

    def _lose(self, loss: Loss) -> None:
        """End the stream; only the first loss counts."""
        self._loss = self._loss or loss
        self._lines.stream_lost()
        if self._scope is not None:
            self._scope.cancel()

    # writing

    def _write(self, *bodies: bytes, again: bool = False) -> None:
        """Write lines; dropped unless the driver is attached. `again`: at the driver's demand."""
        if not self._lines.reads:
            return
        data = b"".join([self._lines.frame(body) for body in bodies])
        if again:
            self._attaching.resent_bytes += len(data)
        stream = self._stream
        if isinstance(stream, DirectStream) and not (self._unsent or self._is_writing or self._is_quiet):
            # Mostly there is room for all of it, and a task costs more than writing.
            with suppress(*_STREAM_ENDS):  # `_maintain` finds it too
                data = data[stream.send_now(data) :]
        if data:
            self._unsent += data
            self._work.set()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._lose(Loss("the driver does not read what is written to it", by_driver=True))

    async def _maintain(self, stream_scope: CancelScope) -> None:
        """Attach, and write what the stream did not take at once; end a stream that is broken."""
        try:
            while True:
                if self._attaching.is_due:
                    await self._attach()
                await self._flush()
                await self._next_work()
        except _STREAM_ENDS:
            # Its end, which says more, is still to be read.
            await anyio.sleep(DRAIN_SECONDS)
            stream_scope.cancel()

    async def _flush(self) -> None:
        while self._unsent and not self._is_quiet:
            data = bytes(self._unsent)
            self._unsent.clear()
            self._is_writing = True
            try:
                await self._stream.send(data)
            finally:
                self._is_writing = False

    async def _next_work(self) -> None:
        await self._work.wait()
        self._work = anyio.Event()

    async def _attach(self) -> None:
        """Attach until the driver has answered."""
        attaching, answer_seconds = self._attaching, ANSWER_SECONDS[0]
        gives_up_at = time.monotonic() + wire.LEASE_SECONDS
        while attaching.is_due:
            seconds = self._reading.spend(attaching.resent_bytes)
            await anyio.sleep(max(seconds, attaching.began_at + ATTACH_SECONDS - time.monotonic()))
            if not attaching.is_due:
                return  # the answer to the previous attachment came late
            self._detach()
            attaching.began_at, attaching.resent_bytes = time.monotonic(), 0
            nonce = attaching.nonce = secrets.token_hex(NONCE_DIGITS // 2).encode()
            self._lines.begin_writing(nonce)
            pending = self._lines.frame(body_of_ids(b"pending", self._pending_ids()))
            # What was not written belongs to the attachment before.
            self._unsent[:] = (
                attach_line(nonce, self.reconnect.generation, wire.VERSION, self.reconnect.seconds) + pending
            )
            # A line that is cut when the time is over is followed by another `attach`.
            with anyio.move_on_after(answer_seconds):
                while not self._lines.reads:
                    await self._flush()
                    await self._next_work()
            if self._lines.reads:
                return
            answer_seconds = min(2 * answer_seconds, ANSWER_SECONDS[1])
            # The first time, the driver has the time of its boot.
            if self.was_attached and time.monotonic() > gives_up_at:
                self._lose(
                    Loss(f"the driver has not answered for {wire.LEASE_SECONDS:.0f} s", by_driver=True)
                )

    def _detach(self) -> None:
        if self._lines.reads:
            self._lines.stop_reading()
            self._on_detached()

    # receiving

    async def _receive_stream(self, stream: ByteStream) -> None:
        """Receive until the stream ends, or the driver violates the protocol."""
        try:
            if isinstance(stream, DirectStream):
                await stream.receive_each(self._handle)
            else:
                while True:
                    if seconds := self._handle(await stream.receive(1 << 16)):
                        await anyio.sleep(seconds)
        except _STREAM_ENDS:
            pass
        except ViolationError as violation:
            self._lose(Loss(f"the driver violated the protocol: {violation}", by_driver=True))

    def _handle(self, chunk: bytes) -> float:
        """Handle what has arrived; returns for how long nothing is to be read. Raises ViolationError."""
        for line in self._lines.receive(chunk):
            if isinstance(line, Control):
                self._on_control(line)
            elif line in (DAMAGED, b"lost"):
                self.attach()
            elif line is OVERLONG:
                raise ViolationError(f"it sent a line of more than {self._lines.max_bytes} bytes")
            else:
                self._on_line(line)
        return self._reading.spend(len(chunk) + LINE_COST_BYTES * chunk.count(b"\n"))

    def _on_control(self, line: Control) -> None:
        """Raises ViolationError."""
        attaching = self._attaching
        if line.nonce != attaching.nonce:
            # Another server has attached, or the driver answers late. Attaching again shows which.
            if self._lines.reads:
                self.attach()
        elif line.kind == b"refused":
            if line.numbers[0] > self.reconnect.generation:
                # No other server can have: it would need the state folder, which this server has locked.
                reason = "it says that another server process has taken it over"
                self._lose(Loss(reason, by_driver=True))
        elif line.kind == b"attached" and not self._lines.reads:
            if line.numbers[0] != wire.VERSION:
                raise ViolationError(
                    f"it has wire version {line.numbers[0]}, and this server has {wire.VERSION}"
                )
            self._lines.begin_reading(attaching.nonce)
            attaching.is_due = False
            self.was_attached, self._is_unanswered = True, False
            self.clock.attach()
            self._on_attached()
            self._work.set()

    async def _reopen(self) -> None:
        """Open the stream again, or lose it."""
        was_attached, pause = self._lines.reads, REOPEN_SECONDS[0]
        self._detach()
        self.clock.detach()
        self._lines.stream_lost()
        self._unsent.clear()
        deadline = time.monotonic() + self.reconnect.seconds - self.clock.absent_seconds
        while self.reconnect.seconds and time.monotonic() < deadline:
            if not was_attached:
                await anyio.sleep(pause)
                pause = min(2 * pause, REOPEN_SECONDS[1])
            was_attached = False
            try:
                with anyio.move_on_after(deadline - time.monotonic()) as scope:
                    await self._sandbox.reopen()
            except ProviderUnavailableError:
                self._is_unanswered = False
                continue
            except SandboxLostError as error:
                cause = error.data.get("cause")
                self._lose(Loss(error.message, cause=cause if isinstance(cause, str) else None))
                return
            if not scope.cancelled_caught:
                self._is_unanswered = True
                if self._attaching.nonce:
                    self.attach()
                return
        # A driver can end each of its streams.
        seconds = self.reconnect.seconds
        reason = f"its stream could not be opened again within {seconds} s" if seconds else None
        self._lose(Loss(reason, by_driver=self._is_unanswered))
