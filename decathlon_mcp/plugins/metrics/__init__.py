"""Metrics for Prometheus: `/metrics`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="metrics",
    settings="decathlon_mcp.plugins.metrics.settings:MetricSettings",
    listeners=("decathlon_mcp.plugins.metrics.metrics:create",),
    routes=("decathlon_mcp.plugins.metrics.endpoint:metrics_route",),
)
