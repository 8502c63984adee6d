"""An MCP server that needs only the standard library, and so starts fast. Its one tool does nothing."""

import json
import sys
from typing import Any

TOOL = {"name": "rest", "description": "Do nothing.", "inputSchema": {"type": "object"}}


def handle(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            server_info = {"name": "plain", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server_info}
        case "tools/list":
            return {"tools": [TOOL]}
        case _:
            return {"content": []}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = handle(message["method"], message.get("params") or {})
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
        sys.stdout.flush()
