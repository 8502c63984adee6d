"""Sandboxes that are opened ahead, for the episodes that come next (`--pool`)."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="pool",
    settings="decathlon_mcp.plugins.pool.settings:PoolSettings",
    sandbox_sources=("decathlon_mcp.plugins.pool.pool:create",),
)
