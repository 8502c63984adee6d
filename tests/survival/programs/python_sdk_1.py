"""Python SDK 1.x: `ADDRESS`, or the command of a server on stdio."""

import sys

import anyio
from commands import on_message, serve
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client


async def main(target, *arguments):
    if target.startswith("http"):
        transport = streamable_http_client(target)
    else:
        transport = stdio_client(StdioServerParameters(command=target, args=arguments))
    async with transport as streams, ClientSession(*streams[:2], message_handler=on_message) as session:
        await session.initialize()
        await session.list_tools()

        async def call(tool, arguments):
            result = await session.call_tool(tool, arguments)
            text = "".join(part.text for part in result.content)
            assert not result.isError, text
            return text, result.structuredContent

        await serve(call)


anyio.run(main, *sys.argv[1:])
