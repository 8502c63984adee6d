"""Counting responses: their status, the bytes of their bodies, and the server's share of a call's time."""

from __future__ import annotations

from collections.abc import Awaitable
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.protocol.requests import SCOPE_KEY, RequestContext
from decathlon_mcp.telemetry.metrics import Metrics


class MeteredResponses:
    """ASGI middleware that reports every response to `metrics`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, arrived_at, has_started = self._metrics, perf_counter(), False

        # Not a coroutine itself: each of its two calls in a request would cost twice as much.
        def metered_send(message: Message) -> Awaitable[None]:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                metrics.responses.labels(message["status"]).inc()
                return send(message)
            metrics.response_bytes.inc(len(message.get("body", b"")))
            context: RequestContext | None = scope.get(SCOPE_KEY)
            if context is not None and context.replied_at and not message.get("more_body"):
                metrics.request_seconds.observe(context.called_at - arrived_at)
                metrics.response_seconds.observe(perf_counter() - context.replied_at)
            return send(message)

        try:
            await self._app(scope, receive, metered_send)
        except Exception:
            if not has_started:
                # Starlette's outermost layer makes the response to an unexpected exception.
                metrics.responses.labels(500).inc()
            raise
