"""Makes the calls of a script at an episode's address and prints the replies.

    python3 script_player.py ADDRESS FILE

The file has a call per line: `{"name": ..., "arguments": {...}}`. MCP revision 2026-07-28, which has no
sessions: a request per call. Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

REVISION = "2026-07-28"
TIMEOUT_SECONDS = 600
"""Without a byte from the server, which waits for a tool as long as the task's deadlines say."""


def main(address: str, file: str) -> None:
    # Not `splitlines`, which also splits at characters that JSON allows in a string, such as U+2028.
    for number, line in enumerate(Path(file).read_text("utf-8").split("\n"), 1):
        if line.strip():
            call(address, number, json.loads(line))


def call(address: str, number: int, params: dict[str, object]) -> None:
    meta: dict[str, object] = {
        "io.modelcontextprotocol/protocolVersion": REVISION,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {**params, "_meta": meta}
    request = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": REVISION,
        "Mcp-Method": "tools/call",
        "Mcp-Name": str(params["name"]),
    }
    sent = urllib.request.Request(address, json.dumps(request).encode(), headers)
    # Without a proxy: the address belongs to a container on the same network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(sent, timeout=TIMEOUT_SECONDS) as reply:
        sys.stdout.write(f"{params['name']}: {reply.read().decode()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
