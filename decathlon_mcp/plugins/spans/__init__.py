"""Spans for OpenTelemetry: `--spans`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decathlon_mcp.settings import PluginSettings


class SpanSettings(PluginSettings):
    """Whether spans are exported."""

    section: ClassVar[str] = "Files and logs"

    spans: bool = Field(
        False,
        description="Send spans of requests, calls, set-ups and gradings to an OpenTelemetry collector, by "
        "OTLP over HTTP. The variables `OTEL_*` set its address and all else. Requires the extra `otel`.",
    )
