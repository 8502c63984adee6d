"""Sandboxes that are containers of a Docker engine, and images of an engine in folders: `doctor --unpack`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="docker",
    providers={"docker": "decathlon_mcp.plugins.docker.plugin:PROVIDER"},
    image_provider="docker",
    unpack_image="decathlon_mcp.plugins.docker.unpacking:unpack_for_host",
)
