"""Spans for OpenTelemetry: `--spans`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="spans",
    settings="decathlon_mcp.plugins.spans.settings:SpanSettings",
    spans="decathlon_mcp.plugins.spans.exporting:create",
)
