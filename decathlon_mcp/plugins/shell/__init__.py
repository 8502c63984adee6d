"""A shell plays an episode of a running server, one process per step: `episode`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="shell", commands=("decathlon_mcp.plugins.shell.shell:add_commands",))
