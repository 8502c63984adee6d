"""Tools that send notifications (log messages, progress, list changes), and one that may return an error."""

from __future__ import annotations

import anyio
import mcp_types as types
from mcp.server.subscriptions import InMemorySubscriptionBus, ToolsListChanged
from mcp.shared.exceptions import MCPError
from tool import Context, Result, Tool, text_result

PAUSE_SECONDS = 0.05
LIST_CHANGES = InMemorySubscriptionBus()


async def log(ctx: Context, params: types.CallToolRequestParams) -> Result:
    """Send three log messages. Since revision 2026-07-28 only requests with a log level receive them."""
    for text in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.session.send_log_message(  # pyright: ignore[reportDeprecated]
            "info", text, related_request_id=ctx.request_id
        )
        await anyio.sleep(PAUSE_SECONDS)
    return text_result("Three messages were logged.")


async def report_progress(ctx: Context, params: types.CallToolRequestParams) -> Result:
    for progress in (0, 50, 100):
        await ctx.session.report_progress(progress, 100, f"{progress} of 100")
        await anyio.sleep(PAUSE_SECONDS)
    return text_result("Progress was reported three times.")


async def announce_list_change(ctx: Context, params: types.CallToolRequestParams) -> Result:
    """Announce that the list of tools changed, although it did not."""
    # Clients of revision 2026-07-28 subscribe to changes; earlier ones get a notification.
    await LIST_CHANGES.publish(ToolsListChanged())
    await ctx.session.send_tool_list_changed()
    return text_result("A change of the list of tools was announced.")


async def require_sampling(ctx: Context, params: types.CallToolRequestParams) -> Result:
    """Return a JSON-RPC error, not a tool error, unless the client declares sampling."""
    capabilities = ctx.session.client_capabilities
    if capabilities is None or capabilities.sampling is None:
        raise MCPError(
            types.MISSING_REQUIRED_CLIENT_CAPABILITY,
            "This tool requires a client with sampling",
            {"requiredCapabilities": {"sampling": {}}},
        )
    return text_result("The client supports sampling.")


TOOLS = (
    Tool("test_tool_with_logging", "Logs three messages.", log),
    Tool("test_logging_tool", "Logs three messages.", log),
    Tool("test_tool_with_progress", "Reports progress three times.", report_progress),
    Tool("test_reconnection", "Logs three messages.", log),
    Tool("test_trigger_tool_change", "Announces that the list of tools changed.", announce_list_change),
    Tool("test_missing_capability", "Returns an error to clients without sampling.", require_sampling),
)
