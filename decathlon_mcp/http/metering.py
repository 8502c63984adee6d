"""Counting requests: their responses, the bytes of their bodies, and the server's share of a call's time."""

from __future__ import annotations

from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.protocol.context import SCOPE_KEY, RequestContext
from decathlon_mcp.telemetry.metrics import Metrics


class MeteredRequests:
    """ASGI middleware that reports every request to `metrics`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, begun_at = self._metrics, perf_counter()
        answered = False

        async def metered_receive() -> Message:
            message = await receive()
            if body := message.get("body"):
                metrics.request_bytes.add(count=len(body))
            return message

        async def metered_send(message: Message) -> None:
            nonlocal answered
            await send(message)
            if message["type"] == "http.response.start":
                answered = True
                metrics.responses.add(str(message["status"]))
                return
            if body := message.get("body"):
                metrics.response_bytes.add(count=len(body))
            context: RequestContext | None = scope.get(SCOPE_KEY)
            if not message.get("more_body") and context is not None and context.replied_at:
                metrics.relayed(context.called_at - begun_at, perf_counter() - context.replied_at)

        try:
            await self._app(scope, metered_receive, metered_send)
        except Exception:
            if not answered:
                # Starlette's outermost layer makes the response of an unexpected exception.
                metrics.responses.add("500")
            raise
