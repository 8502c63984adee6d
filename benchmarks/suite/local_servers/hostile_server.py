"""An MCP server whose replies are as large and as expensive to decode as its caller asks for."""

import json
import sys

PATTERNS = {"brackets": ("[", "[],", "[]]"), "text": ('"', "x", '"')}
"""First part, repeated part and last part of a value, by the name of the pattern."""
TOOL = {
    "name": "reply",
    "description": "Reply with a value of this size.",
    "inputSchema": {
        "type": "object",
        "properties": {"pattern": {"enum": list(PATTERNS)}, "size_bytes": {"type": "integer"}},
        "required": ["pattern", "size_bytes"],
    },
}


def write_reply(request_id: int, pattern: str, size_bytes: int) -> None:
    first, repeated, last = PATTERNS[pattern]
    text = first + repeated * (size_bytes // len(repeated)) + last
    head = json.dumps({"jsonrpc": "2.0", "id": request_id})[:-1]
    sys.stdout.write(head + ', "result": {"content": [], "structuredContent": {"value": ' + text + "}}}\n")


def write_result(request_id: int, result: object) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}) + "\n")


for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize":
            server_info = {"name": "hostile", "version": "1"}
            version = message["params"]["protocolVersion"]
            write_result(
                message["id"],
                {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server_info},
            )
        case "tools/list":
            write_result(message["id"], {"tools": [TOOL]})
        case "tools/call":
            arguments = message["params"]["arguments"]
            write_reply(message["id"], arguments["pattern"], arguments["size_bytes"])
        case _:
            pass
    sys.stdout.flush()
