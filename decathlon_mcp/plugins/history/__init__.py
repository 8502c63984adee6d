"""The episodes and runs of state folders: `runs`, `show`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="history", commands=("decathlon_mcp.plugins.history.commands:add_commands",))
