"""Spans for OpenTelemetry: `--spans`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="spans", spans="decathlon_mcp.plugins.spans.exporting:exported_spans")
