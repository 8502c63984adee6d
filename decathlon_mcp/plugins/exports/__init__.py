"""Episodes in the formats of others, and tasks as folders for Harbor: `export`, `export-tasks`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="exports", commands=("decathlon_mcp.plugins.exports.commands:add_commands",))
