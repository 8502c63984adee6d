"""A server on the MCP SDK that says what its process is like, and runs code."""

from __future__ import annotations

import json
import traceback

from mcp.server.mcpserver import MCPServer

mcp = MCPServer("state")


@mcp.tool()
def state() -> str:
    """What the process is like."""
    from process_state import process_state

    return json.dumps(process_state(), default=repr)


@mcp.tool()
def run(code: str) -> str:
    """Run code, which prints."""
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            exec(code, {"__name__": "code"})
        except BaseException:
            print(traceback.format_exc())
    return output.getvalue()


mcp.run()
