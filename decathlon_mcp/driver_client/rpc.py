"""Messages on a byte stream: JSON objects, one a line, of bounded length, written whole or not at all.

Requests side by side on one line: their ids, what comes for each, their cancellation, the line's end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from pydantic_core import from_json

from decathlon_mcp.driver_client.tunnels import OF_CONNECTIONS, Tunnels
from decathlon_mcp.errors import CallTimeoutError, DriverError, LimitExceededError, SandboxLostError
from decathlon_mcp.types import JsonObject, as_json, as_object

SEND_SECONDS = 30.0
"""How long a message may take to be written: a driver that does not read for so long is lost."""


class Line:
    """A byte stream as a stream of messages."""

    def __init__(self, stream: ByteStream, *, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._sending = anyio.Lock(fast_acquire=True)

    async def send(self, message: dict[str, Any]) -> None:
        """Write one message. Cancellation never leaves half of one on the line.

        Raises SandboxLostError when the other end is gone or does not read.
        """
        data = as_json(message) + b"\n"
        if len(data) > self._max_bytes:
            raise LimitExceededError(
                f"a message of {len(data)} bytes does not fit on the line ({self._max_bytes} at most)"
            )
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        async with self._sending:
            with anyio.move_on_after(SEND_SECONDS, shield=True) as scope:
                try:
                    await self._stream.send(data)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    raise SandboxLostError("the sandbox is gone") from None
            if scope.cancelled_caught:
                raise SandboxLostError(f"the sandbox has not read from its line for {SEND_SECONDS:.0f} s")

    async def messages(self) -> AsyncGenerator[tuple[dict[str, Any], int]]:
        """Every message with its bytes, until the stream ends. What is no JSON object is passed over.

        Raises LimitExceededError for a line that is too long.
        """
        begun = bytearray()
        while True:
            try:
                chunk = await self._stream.receive(1 << 16)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
            first, *others = chunk.split(b"\n")
            begun += first
            if len(begun) > self._max_bytes:
                raise LimitExceededError(f"the driver sent a line of more than {self._max_bytes} bytes")
            for following in others:
                if (message := _parse(begun)) is not None:
                    yield message, len(begun)
                begun = bytearray(following)


def _parse(line: bytearray) -> dict[str, Any] | None:
    try:
        message = from_json(line, allow_inf_nan=False)
    except ValueError:
        return None
    return as_object(message)


MAX_NOTES = 10_000
MAX_NOTES_BYTES = 8 << 20
"""Notifications kept for a request whose caller is slow; the oldest go first."""

Note = Callable[[JsonObject], Awaitable[None]]


@dataclass(slots=True)
class _Pending:
    """A request on the line, and what has come for it."""

    news: anyio.Event = field(default_factory=anyio.Event)
    notes: deque[tuple[str, JsonObject, int]] = field(default_factory=deque[tuple[str, JsonObject, int]])
    notes_bytes: int = 0
    reply: JsonObject | None = None

    def note(self, kind: str, params: JsonObject, size: int) -> None:
        self.notes.append((kind, params, size))
        self.notes_bytes += size
        while len(self.notes) > MAX_NOTES or self.notes_bytes > MAX_NOTES_BYTES:
            self.next_note()
        self.news.set()

    def next_note(self) -> tuple[str, JsonObject]:
        kind, params, size = self.notes.popleft()
        self.notes_bytes -= size
        return kind, params


class RpcClient:
    """Whoever asks waits in its own task; `read` runs in one beside, until the line ends.

    Ids are never used twice. What is said to nobody's request is passed over: the other end may have been
    taken over by whoever is in the sandbox.
    """

    def __init__(
        self, stream: ByteStream, explain: Callable[[str | None], Awaitable[SandboxLostError]]
    ) -> None:
        self._line = Line(stream, max_bytes=wire.MAX_LINE_BYTES)
        self._explain = explain
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self.connections = Tunnels(self.notify)
        self._why_lost: str | None = None
        self.ready = False
        """Has the driver said that it is up?"""
        self.settled = anyio.Event()
        """Set once the driver is up, or will never be."""
        self.lost = anyio.Event()
        """Set when the line has ended."""

    async def request(
        self,
        method: str,
        params: JsonObject,
        *,
        timeout_seconds: float | None = None,
        listeners: Mapping[str, Note | None] | None = None,
    ) -> Any:
        """The result. `listeners`: who is told of the notifications that come meanwhile, by their method.

        Raises DriverError, CallTimeoutError, SandboxLostError; given up, it is cancelled at the other end.
        """
        number = next(self._ids)
        pending = self._pending[number] = _Pending()
        finished = False
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            with anyio.move_on_after(timeout_seconds):
                reply = await self._wait(pending, listeners or {})
                finished = True
                return _result_of(reply)
            raise CallTimeoutError(
                f"no answer to {method} within {timeout_seconds:g} s", seconds=timeout_seconds
            )
        finally:
            del self._pending[number]
            if not finished and not self.lost.is_set():
                await self._send_cancel(number)

    async def notify(self, method: str, params: JsonObject) -> None:
        """Tell the driver something that has no answer. Raises SandboxLostError."""
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def say(self, data: bytes) -> None:
        """Write bytes that are no message: the driver's own source."""
        await self._line.send_bytes(data)

    async def read(self) -> None:
        """Take what comes until the line ends."""
        try:
            async for message, size in self._line.messages():
                self._take(message, size)
        except LimitExceededError as error:
            self.lose(error.message)
        self.lose()

    def lose(self, why: str | None = None) -> None:
        """The line is over; whoever waits is told."""
        if not self.lost.is_set():
            self._why_lost = why
            self.lost.set()
            self.settled.set()
            for pending in self._pending.values():
                pending.news.set()
            self.connections.end()

    async def loss(self) -> SandboxLostError:
        """Why the line ended."""
        return await self._explain(self._why_lost)

    async def _wait(self, pending: _Pending, listeners: Mapping[str, Note | None]) -> JsonObject:
        while True:
            await pending.news.wait()
            pending.news = anyio.Event()
            while pending.notes:
                kind, note = pending.next_note()
                if (listener := listeners.get(kind)) is not None:
                    await listener(note)
            if pending.reply is not None:
                return pending.reply
            if self.lost.is_set():
                raise await self.loss()

    async def _send(self, message: JsonObject) -> None:
        if self.lost.is_set():
            raise await self.loss()
        try:
            await self._line.send(message)
        except SandboxLostError as error:
            self.lose(error.message)
            raise await self.loss() from None

    async def _send_cancel(self, number: int) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._line.send({"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": number}})
            except SandboxLostError as error:
                self.lose(error.message)

    def _take(self, message: JsonObject, size: int) -> None:
        number = message.get("id")
        if isinstance(number, int):
            if (pending := self._pending.get(number)) is not None and pending.reply is None:
                pending.reply = message
                pending.news.set()
            return
        method, params = message.get("method"), as_object(message.get("params")) or {}
        if method in (wire.PROGRESS, wire.MESSAGE):
            note, number = as_object(params.get("params")), params.get("id")
            if note is not None and isinstance(number, int) and (pending := self._pending.get(number)):
                pending.note(str(method), note, size)
        elif method in OF_CONNECTIONS:
            self.connections.hear(str(method), params)
        elif method == wire.READY:
            self.ready = True
            self.settled.set()


def _result_of(reply: JsonObject) -> Any:
    if "result" in reply:
        return reply["result"]
    error = as_object(reply.get("error")) or {}
    code, said, data = error.get("code"), error.get("message"), error.get("data")
    reason = wire.REASONS.get(code, "driver_fault") if isinstance(code, int) else "driver_fault"
    message = str(said)[:4000] if said else reason
    if reason == "timeout":
        raise CallTimeoutError(message)
    raise DriverError(message, reason=reason, **({"about": about} if (about := as_object(data)) else {}))
