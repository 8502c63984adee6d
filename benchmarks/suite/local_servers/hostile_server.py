"""An MCP server whose replies and workspace are as large and as expensive as its caller asks for."""

import json
import os
import sys
from pathlib import Path

PATTERNS = {"brackets": ("[", "[],", "[]]"), "text": ('"', "x", '"')}
"""First part, repeated part and last part of a value, by the name of the pattern."""
TOOLS = [
    {
        "name": "reply",
        "description": "Reply with a value of this size.",
        "inputSchema": {
            "type": "object",
            "properties": {"pattern": {"enum": list(PATTERNS)}, "size_bytes": {"type": "integer"}},
            "required": ["pattern", "size_bytes"],
        },
    },
    {
        "name": "link",
        "description": "Write a file of this size, and hard links to it, into the workspace.",
        "inputSchema": {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "size_bytes": {"type": "integer"}},
            "required": ["number", "size_bytes"],
        },
    },
]


def write_reply(request_id: int, pattern: str, size_bytes: int) -> None:
    first, repeated, last = PATTERNS[pattern]
    text = first + repeated * (size_bytes // len(repeated)) + last
    head = json.dumps({"jsonrpc": "2.0", "id": request_id})[:-1]
    sys.stdout.write(head + ', "result": {"content": [], "structuredContent": {"value": ' + text + "}}}\n")


def write_links(number: int, size_bytes: int) -> None:
    Path("content").write_bytes(b"x" * size_bytes)
    for link in range(number):
        os.link("content", f"link-{link}")


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
            write_result(message["id"], {"tools": TOOLS})
        case "tools/call":
            arguments = message["params"]["arguments"]
            if message["params"]["name"] == "link":
                write_links(arguments["number"], arguments["size_bytes"])
                write_result(message["id"], {"content": []})
            else:
                write_reply(message["id"], arguments["pattern"], arguments["size_bytes"])
        case _:
            pass
    sys.stdout.flush()
