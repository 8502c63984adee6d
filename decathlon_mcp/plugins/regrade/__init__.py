"""Kept attempts are graded again with the evaluators of now: `regrade`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="regrade",
    settings="decathlon_mcp.plugins.regrade.settings:KeepSettings",
    commands=("decathlon_mcp.plugins.regrade.commands:add_commands",),
    episodes=("decathlon_mcp.plugins.regrade.keeping:create",),
)
