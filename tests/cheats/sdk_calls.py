"""Lists the tools of an address and makes calls whose replies are given, with a Python SDK.

Arguments: `legacy` or `auto`, the address, a file with a JSON array of replies' members, and the time limit
of a call in seconds. Prints the names of the tools and the exceptions that are no JSON-RPC errors of a task's
server, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp
import mcp.shared.exceptions
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

EXCEPTIONS: Any = mcp.shared.exceptions
SdkError: Any = getattr(EXCEPTIONS, "MCPError", None) or EXCEPTIONS.McpError


def is_of_the_task(error: Any) -> bool:
    """Whether an exception is a JSON-RPC error of a task's server."""
    if not isinstance(error, SdkError):
        return False
    data: Any = error.error.data
    return data is not None and data.get("source") == "task"


@asynccontextmanager
async def connected(mode: str, address: str) -> AsyncGenerator[Any]:
    if mode == "auto":
        async with mcp.Client(address, mode="auto") as client:
            yield client
        return
    async with (
        streamable_http_client(address) as (read, write, *_),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        yield session


async def main(mode: str, address: str, replies: list[str], seconds: float) -> None:
    tools: list[str] = []
    raised: list[str] = []
    async with connected(mode, address) as client:
        try:
            tools = [tool.name for tool in (await client.list_tools()).tools]
        except Exception as error:  # noqa: BLE001
            raised.append(f"tools/list: {type(error).__name__}: {error}"[:500])
        for members in replies:
            try:
                with anyio.fail_after(seconds):
                    await client.call_tool("root__reply", {"members": members})
            except Exception as error:  # noqa: BLE001
                if not is_of_the_task(error):
                    raised.append(f"{members}: {type(error).__name__}: {error}"[:500])
    sys.stdout.write(json.dumps({"tools": tools, "raised": raised}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), float(sys.argv[4]))
