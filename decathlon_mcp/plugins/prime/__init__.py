"""Sandboxes on the machines of Prime Intellect."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="prime", providers={"prime": "decathlon_mcp.plugins.prime.provider:PROVIDER"})
