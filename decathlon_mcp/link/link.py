"""One connection to one driver: requests side by side, their progress, their cancellation, the line's end."""

from __future__ import annotations

import itertools
import platform
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import anyio
from decathlon_sandbox import wire
from pydantic import ValidationError

from decathlon_mcp.beside import beside
from decathlon_mcp.beside import beside
from decathlon_mcp.errors import (
    CallTimeoutError,
    DriverError,
    ImageError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.link.boot import boot_message
from decathlon_mcp.link.facts import RunResult, ServerFacts
from decathlon_mcp.link.line import Line
from decathlon_mcp.model import JsonObject, as_object
from decathlon_mcp.providers.base import Sandbox

BOOT_SECONDS = 60.0
GRACE_SECONDS = 10.0
"""How much longer than the driver's own deadline the link waits for its answer."""
MAX_NOTES = 10_000

Note = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class _Pending:
    """A request on the line: what came for it, and who is told."""

    news: anyio.Event = field(default_factory=anyio.Event)
    notes: deque[tuple[str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    reply: dict[str, Any] | None = None

    def tell(self) -> None:
        self.news.set()


class Link:
    """What can be asked of a driver. Made by `connect`.

    Every method raises SandboxLostError once the line has ended, and DriverError with one of the wire's
    reasons when the driver could not do what was asked.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._line = Line(sandbox.stream, max_bytes=wire.MAX_LINE_BYTES)
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._why_lost: str | None = None
        self._booted = False
        self._settled = anyio.Event()
        self.lost = anyio.Event()
        """Set when the line has ended."""
        self.servers_changed = anyio.Event()
        """Set (and replaced) whenever a server says that its tools changed."""

    async def arrange(self, *steps: dict[str, Any]) -> None:
        """Make, copy, remove, write files, or check that names are absent: in order, until one fails."""
        await self._request(wire.ARRANGE, {"steps": list(steps)})

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        timeout_seconds: float,
        env: Mapping[str, str] | None = None,
        inherit: Literal["all", "minimal"] = "all",
        output_bytes: int = 65536,
        channel: bool = False,
    ) -> RunResult:
        """Run a process that ends. A program that is not there is a DriverError with reason `spawn`."""
        said = await self._request(
            wire.RUN,
            {
                "argv": list(argv),
                "cwd": cwd,
                "env": dict(env or {}),
                "inherit": inherit,
                "timeout_seconds": timeout_seconds,
                "output_bytes": output_bytes,
                "channel": channel,
            },
            timeout_seconds=timeout_seconds + GRACE_SECONDS,
        )
        return _checked(RunResult, said)

    async def start(
        self, servers: Sequence[Mapping[str, Any]], *, deadline_seconds: float
    ) -> dict[str, ServerFacts]:
        """Start the task's servers side by side and list their tools.

        Raises DriverError with reason `server` and data `server`, `stderr` when one does not come up.
        """
        said = await self._request(
            wire.START,
            {"servers": [dict(server) for server in servers], "deadline_seconds": deadline_seconds},
            timeout_seconds=deadline_seconds + GRACE_SECONDS,
        )
        facts = as_object((as_object(said) or {}).get("servers"))
        if facts is None:
            raise DriverError("the driver's answer is not of the wire's form", reason="invalid_request")
        return {name: _checked(ServerFacts, fact) for name, fact in facts.items()}

    async def call(
        self,
        server: str,
        method: str,
        params: Mapping[str, Any],
        *,
        timeout_seconds: float | None,
        on_progress: Note | None = None,
        on_message: Note | None = None,
    ) -> dict[str, Any]:
        """Relay one request to a task's server; its whole reply (`result` or `error`) as it came.

        `on_progress` and `on_message` get the params of the notifications that come meanwhile, in order.
        Raises CallTimeoutError; being cancelled cancels the call in the sandbox too.
        """
        said = await self._request(
            wire.CALL,
            {"server": server, "method": method, "params": params, "timeout_seconds": timeout_seconds},
            timeout_seconds=None if timeout_seconds is None else timeout_seconds + GRACE_SECONDS,
            listeners={wire.PROGRESS: on_progress, wire.MESSAGE: on_message},
        )
        reply = as_object(said)
        if reply is None or ("result" in reply) == ("error" in reply):
            raise DriverError(
                f"server {server} sent a reply that is neither a result nor an error", reason="server"
            )
        return reply

    async def freeze(self) -> None:
        """Kill every process of the sandbox but the driver; no server runs again."""
        await self._request(wire.FREEZE, {}, timeout_seconds=30.0)

    async def ping(self) -> None:
        """Does the driver answer? Renews its lease."""
        await self._request(wire.PING, {}, timeout_seconds=wire.LEASE_SECONDS)

    async def _request(
        self,
        method: str,
        params: dict[str, Any],
        *,
        timeout_seconds: float | None = None,
        listeners: Mapping[str, Note | None] | None = None,
    ) -> Any:
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

    async def _wait(self, pending: _Pending, listeners: Mapping[str, Note | None]) -> dict[str, Any]:
        while True:
            await pending.news.wait()
            pending.news = anyio.Event()
            while pending.notes:
                kind, note = pending.notes.popleft()
                if (listener := listeners.get(kind)) is not None:
                    await listener(note)
            if pending.reply is not None:
                return pending.reply
            if self.lost.is_set():
                raise await self.loss()

    async def _send(self, message: dict[str, Any]) -> None:
        if self.lost.is_set():
            raise await self.loss()
        try:
            await self._line.send(message)
        except SandboxLostError as error:
            self._lose(error.message)
            raise await self.loss() from None

    async def _send_cancel(self, number: int) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._line.send({"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": number}})
            except SandboxLostError as error:
                self._lose(error.message)

    async def loss(self) -> SandboxLostError:
        """Why the line ended, in the provider's words where it knows."""
        cause = await self._sandbox.cause_of_end()
        why = self._why_lost or "the sandbox's first process ended"
        return SandboxLostError(f"sandbox lost: {why}{f' ({cause})' if cause else ''}", cause=cause)

    def _lose(self, why: str | None = None) -> None:
        if not self.lost.is_set():
            self._why_lost = why
            self.lost.set()
            self._settled.set()
            for pending in self._pending.values():
                pending.tell()

    async def _read(self) -> None:
        try:
            async for message in self._line.messages():
                self._take(message)
        except LimitExceededError as error:
            self._lose(error.message)
        self._lose()

    def _take(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if isinstance(number, int):
            if (pending := self._pending.get(number)) is not None and pending.reply is None:
                pending.reply = message
                pending.tell()
            return
        params = as_object(message.get("params"))
        if params is None:
            return
        method = message.get("method")
        if method in (wire.PROGRESS, wire.MESSAGE):
            self._take_note(str(method), params)
        elif method == wire.CHANGED:
            self.servers_changed.set()
            self.servers_changed = anyio.Event()
        elif method == wire.READY:
            self._booted = True
            self._settled.set()

    def _take_note(self, method: str, params: JsonObject) -> None:
        note, number = as_object(params.get("params")), params.get("id")
        if note is not None and isinstance(number, int) and (pending := self._pending.get(number)):
            pending.notes.append((method, note))
            pending.tell()

    async def _keep_alive(self) -> None:
        while not self.lost.is_set():
            await anyio.sleep(wire.LEASE_SECONDS / 3)
            try:
                await self.ping()
            except CallTimeoutError:
                self._lose(f"the driver has not answered for {wire.LEASE_SECONDS:.0f} s")
            except (SandboxLostError, DriverError):
                pass

    async def _boot(self) -> None:
        await self._line.send_bytes(boot_message())
        with anyio.move_on_after(BOOT_SECONDS):
            await self._settled.wait()
        if not self._booted:
            raise await self._boot_error()

    async def _boot_error(self) -> ImageError | SandboxLostError:
        log = self._sandbox.log_tail.strip()
        image = self._sandbox.spec.image or f"this machine ({platform.node()})"
        if "decathlon: this Python lacks" in log or "decathlon: Python 3.10" in log:
            return ImageError(
                f"{image} cannot run the driver: {log.rpartition('decathlon: ')[2]}", image=image
            )
        if not self.lost.is_set():
            return SandboxLostError(f"the driver did not come up within {BOOT_SECONDS:.0f} s")
        error = await self.loss()
        return SandboxLostError(f"{error.message}; its last words: {log[-500:] or '(none)'}", **error.data)


@asynccontextmanager
async def connect(sandbox: Sandbox) -> AsyncGenerator[Link]:
    """Boot the driver of an open sandbox and hold the line to it.

    Raises ImageError when its Python cannot run the driver, SandboxLostError when it does not come up.
    """
    link = Link(sandbox)
    async with beside() as tasks:
        tasks.start_soon(link._read)  # pyright: ignore[reportPrivateUsage]
        try:
            await link._boot()  # pyright: ignore[reportPrivateUsage]
            tasks.start_soon(link._keep_alive)  # pyright: ignore[reportPrivateUsage]
            yield link
        finally:
            link._lose("the episode ended")  # pyright: ignore[reportPrivateUsage]


def _result_of(reply: dict[str, Any]) -> Any:
    if "result" in reply:
        return reply["result"]
    error = as_object(reply.get("error")) or {}
    code, said, data = error.get("code"), error.get("message"), error.get("data")
    reason = wire.REASONS.get(code, "driver_fault") if isinstance(code, int) else "driver_fault"
    message = str(said)[:4000] if said else reason
    if reason == "timeout":
        raise CallTimeoutError(message)
    raise DriverError(message, reason=reason, **({"about": about} if (about := as_object(data)) else {}))


_Said = TypeVar("_Said", RunResult, ServerFacts)


def _checked(kind: type[_Said], said: Any) -> _Said:
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise DriverError(
            f"the driver's answer is not of the wire's form: {error.error_count()} faults",
            reason="invalid_request",
        ) from None
