"""What a server asks of the plug-in with spans: one around each request, and those of each episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from decathlon_mcp.telemetry.metrics import EpisodeMetrics, Metrics, TaskKey


class Spans(Protocol):
    """Makes the spans of one server."""

    async def serve(self, serve: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        """What `serve` returns for a `protocol.requests.Request`, whose `_meta` may get more members."""
        ...

    def episode(self, metrics: Metrics, key: TaskKey, public_id: str) -> EpisodeMetrics:
        """What an episode reports to instead of `metrics.episode`."""
        ...

    async def end(self) -> bool:
        """Send what has not been sent yet, within a limit of time; whether that was enough."""
        ...
