"""Agent programs as players: `serve-episode`, `episode verdict`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="agents", commands=("decathlon_mcp.plugins.agents.commands:add_commands",))
