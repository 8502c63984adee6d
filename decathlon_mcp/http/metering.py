"""Counting responses: their status, the bytes of their bodies, and the server's share of a call's time."""

from __future__ import annotations

from collections.abc import Awaitable
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.protocol.requests import SCOPE_KEY, RequestContext
from decathlon_mcp.telemetry.metrics import Metrics


class ResponseMeter:
    """Reports the response to a request that has just arrived to `metrics`."""

    __slots__ = ("_arrived_at", "_metrics", "_scope", "response_started")

    def __init__(self, metrics: Metrics, scope: Scope) -> None:
        self.response_started = False
        self._metrics = metrics
        self._scope = scope
        self._arrived_at = perf_counter()

    def metered(self, send: Send) -> Send:
        """A `send` that counts what it sends."""

        # Not a coroutine itself: each of its two calls in a request would cost twice as much.
        def metered_send(message: Message) -> Awaitable[None]:
            self.count(message)
            return send(message)

        return metered_send

    def count(self, message: Message) -> None:
        """Count an ASGI message of the response."""
        if message["type"] == "http.response.start":
            self.response_started = True
            self._metrics.responses.labels(message["status"]).inc()
            return
        self._metrics.response_bytes.inc(len(message.get("body", b"")))
        if not message.get("more_body"):
            self._complete()

    def _complete(self) -> None:
        context: RequestContext | None = self._scope.get(SCOPE_KEY)
        if context is not None and context.replied_at:
            self._metrics.request_seconds.observe(context.called_at - self._arrived_at)
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
        meter = ResponseMeter(self._metrics, scope)
        try:
            await self._app(scope, receive, meter.metered(send))
        except Exception:
            if not meter.response_started:
                # Starlette's outermost layer makes the response to an unexpected exception.
                self._metrics.responses.labels(500).inc()
            raise
