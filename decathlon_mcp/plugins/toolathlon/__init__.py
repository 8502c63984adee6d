"""Toolathlon's own: local tools, the repair of arguments, and the log that its evaluators read."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="toolathlon", suites=("decathlon_mcp.plugins.toolathlon.suite:ToolathlonHooks",))
