"""Makes calls whose replies are given, with whatever MCP SDK is installed. Prints what happened as JSON.

Arguments: the server's URL, a task, and a file with a JSON array of replies' members.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import mcp.shared.exceptions
from decathlon_client import Decathlon
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

EXCEPTIONS: Any = mcp.shared.exceptions
SdkError: Any = getattr(EXCEPTIONS, "MCPError", None) or EXCEPTIONS.McpError


async def sdk_failures(address: str, replies: list[str]) -> list[str]:
    """The exceptions of the SDK's own client that are no JSON-RPC errors."""
    failures: list[str] = []
    async with (
        streamable_http_client(address) as (read, write, *_),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        await session.list_tools()
        for members in replies:
            try:
                with anyio.fail_after(30):
                    await session.call_tool("root__reply", {"members": members})
            except SdkError:
                pass
            except Exception as error:  # noqa: BLE001
                failures.append(f"{members}: {type(error).__name__}: {error}"[:1000])
    return failures


async def main(url: str, task: str, replies: list[str]) -> None:
    failures: list[str] = []
    failed_calls = 0

    async def play(episode: Any) -> None:
        nonlocal failed_calls
        for members in replies:
            failed_calls += (await episode.act("root__reply", {"members": members})).is_error
        failures.extend(await sdk_failures(episode.address, replies))

    async with Decathlon(url) as client, client.batch([task], concurrency=1) as batch:
        (result,) = [result async for result in batch.run(play)]
    outcome = {"reward": result.reward, "fault": result.fault, "failed": failed_calls, "raised": failures}
    sys.stdout.write(json.dumps({**outcome, "failure": repr(result.failure)}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
