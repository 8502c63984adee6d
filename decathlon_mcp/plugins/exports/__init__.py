"""Episodes and tasks for other tools: `export`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="exports", commands=("decathlon_mcp.plugins.exports.commands:add_commands",))
