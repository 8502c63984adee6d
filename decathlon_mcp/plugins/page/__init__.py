"""What people see in a browser, of a server and of state folders: the page of `serve`, and `view`."""

from decathlon_mcp.hooks import Plugin

PLUGIN = Plugin(
    name="page",
    commands=("decathlon_mcp.plugins.page.commands:add_commands",),
    page="decathlon_mcp.plugins.page.serving:create_page",
)
