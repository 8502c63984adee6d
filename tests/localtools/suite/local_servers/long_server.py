"""MCP server whose results have a given length."""

import json
import sys

NUMBER = {"type": "number"}
TOOLS = [
    {"name": "text", "inputSchema": {"type": "object", "properties": {"characters": NUMBER}}},
    {"name": "several", "inputSchema": {"type": "object", "properties": {"characters": NUMBER}}},
    {
        "name": "structured",
        "inputSchema": {"type": "object", "properties": {"characters": NUMBER}},
        "outputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
]


def call(name, characters):
    text = {"type": "text", "text": "é" * characters}
    if name == "several":
        return {"content": [text, {"type": "text", "text": "and more"}], "isError": True}
    if name == "structured":
        return {"content": [text], "structuredContent": {"text": text["text"]}}
    return {"content": [text]}


def result(message):
    match message["method"]:
        case "initialize":
            return {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "long", "version": "1"},
            }
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            return call(message["params"]["name"], message["params"]["arguments"]["characters"])


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result(message)}), flush=True)
