"""Sandboxes that are opened ahead, for the episodes that come next (`--warm`)."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="pool",
    settings="decathlon_mcp.plugins.pool.settings:PoolSettings",
    sandbox_source="decathlon_mcp.plugins.pool.pool:create",
)
