"""This server becomes an entry of a desktop program: `install`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="install", commands=("decathlon_mcp.plugins.install.install:add_commands",))
