"""Requests side by side on one line: their ids, what comes for each, their cancellation, the line's end."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream
from decathlon_sandbox import wire

from decathlon_mcp.errors import CallTimeoutError, DriverError, LimitExceededError, SandboxLostError
from decathlon_mcp.link.connections import OF_CONNECTIONS, Connections
from decathlon_mcp.link.line import Line
from decathlon_mcp.model import JsonObject, as_object

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


class Conversation:
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
        self.connections = Connections(self.notify)
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
