"""Counting responses: their status, the bytes of their bodies, and the server's share of a call's time."""

from __future__ import annotations

from collections.abc import Awaitable
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.protocol.context import SCOPE_KEY, RequestContext
from decathlon_mcp.telemetry.metrics import Metrics


class ResponseMeter:
    """Reports one response to `metrics`. `begun_at`: when the request was there, as `perf_counter`."""

    __slots__ = ("_begun_at", "_metrics", "_scope", "begun")

    def __init__(self, metrics: Metrics, scope: Scope, begun_at: float) -> None:
        self.begun = False
        self._metrics = metrics
        self._scope = scope
        self._begun_at = begun_at

    def count(self, message: Message) -> None:
        """Count an ASGI message of the response."""
        if message["type"] == "http.response.start":
            self.begin(message["status"])
            return
        self.add(message.get("body", b""))
        if not message.get("more_body"):
            self.complete()

    def begin(self, status: int) -> None:
        """The head is sent."""
        self.begun = True
        self._metrics.responses.labels(status).inc()

    def add(self, body: bytes) -> None:
        """A part of the body is sent."""
        self._metrics.response_bytes.inc(len(body))

    def complete(self) -> None:
        """The whole response is sent."""
        context: RequestContext | None = self._scope.get(SCOPE_KEY)
        if context is not None and context.replied_at:
            self._metrics.request_seconds.observe(context.called_at - self._begun_at)
            self._metrics.response_seconds.observe(perf_counter() - context.replied_at)


class MeteredResponses:
    """ASGI middleware that reports every response to `metrics`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        meter = ResponseMeter(self._metrics, scope, perf_counter())

        # Not a coroutine itself: each of its two calls in a request would cost twice as much.
        def metered_send(message: Message) -> Awaitable[None]:
            meter.count(message)
            return send(message)

        try:
            await self._app(scope, receive, metered_send)
        except Exception:
            if not meter.begun:
                # Starlette's outermost layer makes the response to an unexpected exception.
                self._metrics.responses.labels(500).inc()
            raise
