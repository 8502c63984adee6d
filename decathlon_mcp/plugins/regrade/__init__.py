"""Kept attempts are graded again with the evaluators of now: `regrade`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="regrade", commands=("decathlon_mcp.plugins.regrade.commands:add_commands",))
