"""A task's server changes its tools while an episode is played: the episode's list stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from tests.probe.clients import connected, start
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

LEARNED = "probe__learned"


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]


@pytest.mark.parametrize("address", ["sessionless", "lobby"])
async def test_the_list_stays_and_each_change_is_a_note(served: Served, address: str) -> None:
    changes = list[str]()

    async def on_message(message: Any) -> None:
        changes.append(str(getattr(message, "method", None)))

    url = served.lobby if address == "lobby" else (await start(served, "find-answer"))["address"]
    era = "sessionless" if address == "sessionless" else "handshake"
    async with connected(url, era, message_handler=on_message) as client:
        capabilities = client.server_capabilities
        assert capabilities.tools is not None
        assert capabilities.tools.list_changed is (address == "lobby")
        if address == "lobby":
            await client.call_tool("start_episode", {"task": "find-answer"})
        before = await names(client)
        for _ in range(2):
            await client.call_tool("probe__learn", {})
        with pytest.raises(MCPError, match="there is no tool"):
            await client.call_tool(LEARNED, {})
        assert await names(client) == before
        lines = served.episodes.live[-1].trajectory.file.read_bytes().splitlines()
        notes = [note for note in map(json.loads, lines) if note["event"] == "note"]
        assert [(note["calls"], note["role"]) for note in notes] == [(1, "server"), (2, "server")]
        assert {note["text"] for note in notes} == {
            "the server probe announces that its tools have changed; this episode's list stays as it is"
        }
        # The lobby tells its session of the tools of the new episode, and nobody of these changes.
        assert changes.count("notifications/tools/list_changed") == (address == "lobby")
