"""A client that does what its arguments say and is then killed by the test: URL, ERA, METHOD, PARAMS.

Connects with the SDK's client of the era, lists the tools unless an option prevents it, prints `connected`,
sends one request if there is one, prints `answered` and waits.
"""

from __future__ import annotations

import json
import sys

import anyio

from tests.probe.clients import connected


async def main(url: str, era: str, lists: str, tool: str, arguments: str) -> None:
    async with connected(url, era) as client:
        if lists == "list":
            await client.list_tools()
        print("connected", flush=True)  # noqa: T201
        if tool:
            await client.call_tool(tool, json.loads(arguments), read_timeout_seconds=None)
            print("answered", flush=True)  # noqa: T201
        await anyio.sleep_forever()


if __name__ == "__main__":
    url, era, lists, tool, arguments = sys.argv[1:]
    anyio.run(main, url, era, lists, tool, arguments)
