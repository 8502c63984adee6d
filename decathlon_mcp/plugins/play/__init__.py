"""People play in a terminal, by hand or from a script: `play`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="play", commands=("decathlon_mcp.plugins.play.commands:add_commands",))
