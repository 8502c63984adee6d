"""Metrics for Prometheus, `/metrics`, and their setting."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decathlon_mcp.settings import PluginSettings


class MetricSettings(PluginSettings):
    """What metrics are counted by."""

    section: ClassVar[str] = "Files and logs"

    metrics_tasks: bool = Field(
        False,
        description="Count episodes and verdicts in `/metrics` by task, not only by suite. Every task that "
        "was played adds some time series.",
    )
