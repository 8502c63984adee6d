"""Python SDK 2.x: `ADDRESS [MODE]`."""

import sys

import anyio
from commands import on_message, serve
from mcp import Client


async def main(address, mode="legacy"):
    async with Client(address, mode=mode, message_handler=on_message) as client:
        await client.list_tools()

        async def call(tool, arguments):
            result = await client.call_tool(tool, arguments)
            text = "".join(part.text for part in result.content)
            assert not result.is_error, text
            return text, result.structured_content

        await serve(call)


anyio.run(main, *sys.argv[1:])
