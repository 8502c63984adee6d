"""A task's server changes its tools while an episode is played."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from decathlon_mcp.episodes.tools import offer
from decathlon_mcp.episodes.tools.offered import EpisodeTools
from decathlon_mcp.types import JsonObject
from tests.probe.clients import connected, start
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

LEARNED = "probe__learned"
WAIT_SECONDS = 30


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), provider="host") as served:
        yield served


class Changes:
    """Waits for `tools/list_changed`; `on_message` is a client's handler."""

    def __init__(self) -> None:
        self.count = 0
        self._arrived = anyio.Event()

    async def on_message(self, message: Any) -> None:
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            self.count += 1
            self._arrived.set()

    async def wait(self) -> None:
        with anyio.fail_after(WAIT_SECONDS):
            await self._arrived.wait()
        self._arrived = anyio.Event()


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]


async def text(client: Client, tool: str) -> str:
    result: Any = await client.call_tool(tool, {})
    return result.content[0].text


@pytest.mark.parametrize("address", ["task", "episode", "lobby"])
async def test_a_session_is_notified_and_gets_the_new_list(served: Served, address: str) -> None:
    changes = Changes()
    url = {"task": served.task("find-answer"), "lobby": served.lobby}.get(address)
    url = url or (await start(served, "find-answer"))["address"]
    async with connected(url, message_handler=changes.on_message) as client:
        if address == "lobby":
            await client.call_tool("start_episode", {"task": "find-answer"})
            await changes.wait()
        before = await names(client)
        await client.call_tool("probe__learn", {})
        await changes.wait()
        assert set(await names(client)) - set(before) == {LEARNED}
        assert await text(client, LEARNED) == "called"


async def test_without_a_session_the_first_list_stays_and_all_tools_can_be_called(served: Served) -> None:
    changes, started = Changes(), await start(served, "find-answer")
    async with (
        connected(started["address"], message_handler=changes.on_message) as session,
        connected(started["address"], "sessionless") as client,
    ):
        before = await names(client)
        with pytest.raises(MCPError, match="there is no tool"):
            await client.call_tool(LEARNED, {})
        await client.call_tool("probe__learn", {})
        await changes.wait()
        assert LEARNED in await names(session)
        assert await names(client) == before
        assert await text(client, LEARNED) == "called"


async def test_a_server_that_says_that_its_tools_changed_but_has_the_same_notifies_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer, "MIN_INTERVAL_SECONDS", 0.01)
    compared, change = list[bool](), EpisodeTools.change

    def note(tools: EpisodeTools, server: str, listed: list[JsonObject]) -> bool:
        compared.append(change(tools, server, listed))
        return compared[-1]

    monkeypatch.setattr(EpisodeTools, "change", note)
    changes, started = Changes(), await start(served, "find-answer")
    async with connected(started["address"], message_handler=changes.on_message) as client:
        await names(client)
        for number in (1, 2):
            await client.call_tool("probe__learn", {})
            with anyio.fail_after(WAIT_SECONDS):
                while len(compared) < number:  # noqa: ASYNC110  (the server lists its tools again)
                    await anyio.sleep(0.01)
            if number == 1:
                await changes.wait()
        # A reply comes after the notifications before it.
        await names(client)
        assert compared == [True, False]
        assert changes.count == 1
