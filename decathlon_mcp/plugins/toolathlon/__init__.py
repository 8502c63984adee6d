"""Toolathlon's own: its profiles and releases, local tools, repaired arguments, and its evaluators' log."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="toolathlon",
    profiles=("decathlon_mcp.plugins.toolathlon",),
    releases={"toolathlon": "decathlon_mcp.plugins.toolathlon.release:find_release"},
    suites=("decathlon_mcp.plugins.toolathlon.suite:ToolathlonHooks",),
)
