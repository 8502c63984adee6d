"""An MCP server that needs only the standard library, and so starts fast. Its one tool is `echo`."""

import json
import sys
from typing import Any

TOOL = {
    "name": "echo",
    "description": "Say it again.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def handle(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            server_info = {"name": "plain", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server_info}
        case "tools/list":
            return {"tools": [TOOL]}
        case _:
            return {"content": [{"type": "text", "text": params["arguments"]["text"]}]}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = handle(message["method"], message.get("params") or {})
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
        sys.stdout.flush()
