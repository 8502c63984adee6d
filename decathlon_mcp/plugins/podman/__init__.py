"""Sandboxes that are containers of Podman."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="podman", providers={"podman": "decathlon_mcp.plugins.podman.provider:PROVIDER"})
