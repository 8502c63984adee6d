"""Responses that are written where their request was parsed, without a task, an ASGI message or middleware.

Most requests are tool calls, which wait for nothing but a reply (`protocol.fast_calls`). An ASGI application
costs each of them a task and several layers of coroutines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from decathlon_mcp.http.metering import ResponseMeter

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from decathlon_mcp.http.protocol import LimitedHttpProtocol

DirectHandler: TypeAlias = "Callable[[Scope, bytes], Callable[[DirectResponse], None] | None]"
"""Called with the ASGI scope and the body of a request. Returns what serves the request; None if the ASGI
application has to."""


class HttpApp(Starlette):
    """An ASGI application. `direct` may serve a request instead of it."""

    direct: DirectHandler | None = None


class DirectResponse:
    """The response to one request. Implements `fast_calls.Response`."""

    def __init__(
        self, connection: LimitedHttpProtocol, cycle: RequestResponseCycle, meter: ResponseMeter
    ) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport
        self._meter = meter

    @property
    def receive(self) -> Receive:
        return self._cycle.receive  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    @property
    def is_writable(self) -> bool:
        return not self._connection.flow.write_paused

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, more: bool) -> None:
        """Write the head and the first part of the body. With `more`, the rest follows.

        Without it, the headers must have the content's length.
        """
        cycle = self._cycle
        cycle.response_started, cycle.chunked_encoding = True, more
        self._meter.begin(status)
        lines = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        if more:
            lines += (b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n" % len(body), body, b"\r\n")
        else:
            lines += (b"\r\n", body)
        self._write(lines, body)
        if not more:
            self._complete()

    def end(self, body: bytes) -> None:
        """Write the last part of a body of which there is more."""
        chunk = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
        self._write((*chunk, b"0\r\n\r\n"), body)
        self._complete()

    def _write(self, parts: Iterable[bytes], body: bytes) -> None:
        self._meter.add(body)
        if not self._cycle.disconnected:
            self._transport.write(b"".join(parts))

    def _complete(self) -> None:
        self._meter.complete()
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()
        cycle.on_response = _nothing  # otherwise the cycle and the connection refer to each other

    def continue_in_task(self, serve: Callable[[Receive, Send], Awaitable[None]]) -> None:
        """Have a task write what is left of the response."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            def metered_send(message: Message) -> Awaitable[None]:
                self._meter.count(message)
                return send(message)

            await serve(receive, metered_send)

        self._connection.run_in_task(self._cycle, app)

    def abort(self) -> None:
        """Break the connection off."""
        self._transport.abort()


def _nothing() -> None:
    pass
