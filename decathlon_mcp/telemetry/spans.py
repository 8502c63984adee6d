"""What a server asks of the plug-in with spans. OpenTelemetry's API, unlike its SDK, is always installed."""

from __future__ import annotations

from typing import Protocol

from opentelemetry.trace import Tracer

from decathlon_mcp.telemetry.metrics import EpisodeMetrics, Metrics, TaskKey


class Spans(Protocol):
    """Makes the spans of one server."""

    tracer: Tracer
    """Makes the spans of requests (`protocol/spans.py`)."""

    def episode(self, metrics: Metrics, key: TaskKey, public_id: str) -> EpisodeMetrics:
        """What an episode reports to instead of `metrics.episode`."""
        ...

    async def end(self) -> bool:
        """Send what has not been sent yet, within a limit of time; whether that was enough."""
        ...
