"""Plays tasks with policies that do not solve them, and says which tasks pay or leak: `audit`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="audit", commands=("decathlon_mcp.plugins.audit.commands:add_commands",))
