"""Services that a task reaches at ports of its sandbox: hosted ones, and one of its own for each episode."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(name="services", services="decathlon_mcp.plugins.services.services:open_services")
