"""An episode's calls are made again in a new one, and compared: `replay`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="replay", commands=("decathlon_mcp.plugins.replay.commands:add_commands",))
