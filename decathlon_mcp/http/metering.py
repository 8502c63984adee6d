"""Counting responses: their status, the bytes of their bodies, and the server's share of a call's time."""

from __future__ import annotations

from collections.abc import Awaitable
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.protocol.context import SCOPE_KEY, RequestContext
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
        metrics, begun_at, answered = self._metrics, perf_counter(), False

        # Not a coroutine itself: each of its two calls in a request would cost twice as much.
        def metered_send(message: Message) -> Awaitable[None]:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                metrics.responses.totals[message["status"]] += 1
                return send(message)
            if body := message.get("body"):
                metrics.response_bytes.totals[""] += len(body)
            if not message.get("more_body"):
                context: RequestContext | None = scope.get(SCOPE_KEY)
                if context is not None and context.replied_at:
                    metrics.call_seconds.request.observe(context.called_at - begun_at)
                    metrics.call_seconds.response.observe(perf_counter() - context.replied_at)
            return send(message)

        try:
            await self._app(scope, receive, metered_send)
        except Exception:
            if not answered:
                # Starlette's outermost layer makes the response to an unexpected exception.
                metrics.responses.totals[500] += 1
            raise
