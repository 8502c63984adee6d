"""People play tasks: in a browser at the page's `/play`, or from a script. The command `play`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="play", commands=("decathlon_mcp.plugins.play.commands:add_commands",))
