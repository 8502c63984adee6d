"""An agent that answers in place of its tool server makes no client raise, and so does not lose its 0.

The replies are generated from the SDK's schema, with one fault each, and go through real clients.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from decathlon_client import Decathlon
from decathlon_client.client_errors import RequestError
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError

from tests.fuzz.results import results
from tests.probe.clients import ERAS, connected, start
from tests.probe.serving import Served

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ERRORS: list[Any] = [
    *({}, [], 5, "x", None, {"code": "x", "message": 5}, {"code": None}, {"message": None}),
    *({"code": 10**30, "message": "m"}, {"code": 1.5, "message": "m", "data": []}),
    {"code": -32602, "message": "m", "data": {"code": "sandbox_lost", "source": "server"}},
]
PROGRESS = """'"method": "ping"}\\n{"jsonrpc": "2.0", "method": "notifications/progress", "params": '
'{"progress": PROGRESS, "progressToken": %s}}\\n{"jsonrpc": "2.0", "id": %d, "result": {"content": []}'
% (json.dumps(message["params"]["_meta"]["progressToken"]), message["id"])""".replace("\n", " ")
"""A ping, a notification of progress, and a result."""
SAMPLE = 48
"""Every SAMPLE-th generated result is tried here, all of them by `sdks.py`."""


def replies(step: int) -> list[str]:
    """Members of replies, as the tool `reply` takes them."""
    members = [f'"result": {json.dumps(result)}' for result in results()[::step]]
    members += [f'"result": {value}' for value in ("[1]", "5", "null", '"x"')]
    members += [f'"error": {json.dumps(error)}' for error in ERRORS]
    return [repr(text) for text in members]


@pytest.mark.parametrize("place", ["handshake", "sessionless", "lobby"])
async def test_no_reply_makes_an_sdk_client_raise(server: Served, place: str) -> None:
    started = await start(server, "sum-prices")
    address = server.lobby if place == "lobby" else started["address"]
    async with connected(address, "sessionless" if place == "sessionless" else "handshake") as agent:

        async def call(name: str, arguments: dict[str, Any]) -> Any:
            if place == "lobby":
                arguments = {"episode": started["episode"], "name": name, "arguments": arguments}
                name = "call_tool"
            return await agent.call_tool(name, arguments)

        await relay_replies(call)
    server.find(started["episode"]).close()


async def test_no_reply_over_stdio_makes_an_sdk_client_raise(server: Served) -> None:
    """Through the bridge; a server on stdio sends the same lines."""
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "decathlon_mcp.cli", "stdio", "--task", "sum-prices", "--url", server.url],
        env=dict(os.environ),
    )
    async with Client(stdio_client(parameters), mode=ERAS["sessionless"]) as agent:
        await relay_replies(agent.call_tool)


async def relay_replies(call: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
    """Have the tool reply with each of `replies`; the client gets a result or the task's error for each."""
    replaced, errors = 0, list[Any]()
    for members in replies(SAMPLE):
        try:
            result = await call("root__reply", {"members": members})
        except MCPError as error:
            errors.append(error.error)
        else:
            replaced += any("is not MCP" in getattr(item, "text", "") for item in result.content)
    assert replaced > 5
    assert {error.code for error in errors} == {-32602, -32603}
    assert all(error.data["source"] == "task" and "code" not in error.data for error in errors)


async def test_no_reply_makes_our_client_lose_the_episode(server: Served) -> None:
    async def play(episode: Any) -> None:
        for members in replies(SAMPLE):
            await episode.act("root__reply", {"members": members})

    async def give_up(episode: Any) -> None:
        await episode.call("root__reply", {"members": repr('"error": {"code": 1, "message": "m"}')})

    async with Decathlon(server.url) as client:
        for player in (play, give_up):
            async with client.batch(["sum-prices"], concurrency=1) as batch:
                (result,) = [result async for result in batch.run(player)]
                assert (result.reward, result.fault, result.failure) == (0.0, None, None)
                assert (batch.tally.lost, batch.tally.broken) == (0, 0)


async def test_no_progress_breaks_the_session_of_an_sdk_client(server: Served) -> None:
    """An integer that is no float is an exception in the dispatcher of the SDK 2.3."""
    started = await start(server, "sum-prices")
    reported: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reported.append(progress)

    async with connected(started["address"]) as agent:
        for progress in ("1" + "0" * 400, "true", '"half"', '2, "total": null, "message": 5, "_meta": null'):
            members = PROGRESS.replace("PROGRESS", progress)
            await agent.call_tool("root__reply", {"members": members}, progress_callback=on_progress)
    assert reported == [2]
    server.find(started["episode"]).close()


async def test_refused_result_is_read_by_the_agent_and_its_episode_continues(server: Served) -> None:
    async with Decathlon(server.url) as client, client.episode("sum-prices") as episode:
        members = repr(f'"result": {json.dumps({"content": "found it"})}')
        reply = await episode.call("root__reply", {"members": members})
        assert reply.is_error
        assert "$.content" in reply.text
        assert reply.text.endswith("its text: found it")
        item = {"type": "text", "text": "found it", "annotations": {"priority": 5}, "_meta": None}
        members = repr(f'"result": {json.dumps({"content": [item], "structuredContent": None})}')
        reply = await episode.call("root__reply", {"members": members})
        assert (reply.is_error, reply.text, reply.structured) == (False, "found it", None)
        assert (await episode.call("root__say", {"text": "well"})).text == "well"
        with pytest.raises(RequestError) as caught:
            await episode.call("root__reply", {"members": repr('"error": {"code": 5, "message": "m"}')})
        assert caught.value.data == {"source": "task", "error": {"code": 5}}
