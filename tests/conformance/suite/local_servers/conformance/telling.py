"""Tools that tell something while they run (logs, progress, a change of the tools), and one that refuses."""

from __future__ import annotations

import anyio
import mcp_types as types
from mcp.server.subscriptions import InMemorySubscriptionBus, ToolsListChanged
from mcp.shared.exceptions import MCPError
from tool import Answer, Context, Tool, text

PAUSE_SECONDS = 0.05
CHANGES = InMemorySubscriptionBus()


async def log(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Three log messages; since 2026-07-28 only for a request that asked for them."""
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
            "info", words, related_request_id=ctx.request_id
        )
        await anyio.sleep(PAUSE_SECONDS)
    return text("Three messages were logged.")


async def progress(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    for done in (0, 50, 100):
        await ctx.session.report_progress(done, 100, f"{done} of 100")
        await anyio.sleep(PAUSE_SECONDS)
    return text("Progress was reported three times.")


async def change(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Says that the tools changed, in the words of the connection's revision. They are as they were."""
    await CHANGES.publish(ToolsListChanged())
    await ctx.session.send_tool_list_changed()
    return text("A change of the tools was announced.")


async def refuse(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """An error of the protocol, not of the tool, unless the client can sample."""
    capabilities = ctx.session.client_capabilities
    if capabilities is None or capabilities.sampling is None:
        raise MCPError(
            types.MISSING_REQUIRED_CLIENT_CAPABILITY,
            "This tool needs a client that can sample",
            {"requiredCapabilities": {"sampling": {}}},
        )
    return text("The client can sample.")


TOOLS = (
    Tool("test_tool_with_logging", "Logs three messages.", log),
    Tool("test_logging_tool", "Logs three messages.", log),
    Tool("test_tool_with_progress", "Reports progress three times.", progress),
    Tool("test_reconnection", "Logs three messages.", log),
    Tool("test_trigger_tool_change", "Announces that the tools changed.", change),
    Tool("test_missing_capability", "Refuses a client that cannot sample.", refuse),
)
