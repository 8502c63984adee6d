"""langchain-mcp-adapters: `ADDRESS`. The tools are called as LangChain's agents call them."""

import sys

import anyio
from commands import on_message, serve
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools


async def main(address):
    options = {"transport": "http", "url": address, "session_kwargs": {"message_handler": on_message}}
    async with MultiServerMCPClient({"toolathlon": options}).session("toolathlon") as session:
        tools = {tool.name: tool for tool in await load_mcp_tools(session)}

        async def call(name, arguments):
            message = await tools[name].ainvoke(
                {"type": "tool_call", "id": "1", "name": name, "args": arguments}
            )
            text = "".join(part["text"] for part in message.content)
            assert message.status == "success", text
            return text, (message.artifact or {}).get("structured_content")

        await serve(call)


anyio.run(main, *sys.argv[1:])
