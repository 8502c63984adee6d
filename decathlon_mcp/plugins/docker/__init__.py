"""Sandboxes that are containers of a Docker engine, and images of an engine in folders: `image`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="docker",
    providers={"docker": "decathlon_mcp.plugins.docker.plugin:PROVIDER"},
    image_provider="docker",
    commands=("decathlon_mcp.plugins.docker.commands:add_commands",),
)
