"""MCP server that notes every call in a file: `counting.py FILE TOKEN`. Without the SDK."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def reply(number: Any, result: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}) + "\n")
    sys.stdout.flush()


def call(number: Any, name: str, count: int) -> None:
    with open(sys.argv[1], "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(name + "\n")
    if name == "slow":
        time.sleep(2)
    reply(number, {"content": [{"type": "text", "text": f"{name} {count}"}]})


def main() -> None:
    count = 0
    for line in sys.stdin:
        message = json.loads(line)
        method, number, params = message.get("method"), message.get("id"), message.get("params", {})
        if method == "initialize":
            info = {"name": "counting", "version": "0"}
            version = params["protocolVersion"]
            reply(number, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            reply(number, {"tools": [{"name": name, "inputSchema": {}} for name in ("slow", "count")]})
        elif method == "tools/call":
            count += 1
            call(number, params["name"], count)


main()
