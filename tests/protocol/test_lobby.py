"""The lobby: episodes by explicit handle, with and without a session."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from tests.probe.clients import ERAS, connected, refused, start
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


async def call(client: Any, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


@pytest.mark.parametrize("era", ERAS)
async def test_a_whole_episode_by_its_handle(served: Served, era: str) -> None:
    async with connected(served.lobby, era) as lobby:
        started = await call(lobby, "start_episode", task="find-answer")
        handle = started["episode"]
        assert started["phase"] == "ready"
        assert "Write the answer, 42" in started["prompt"]
        assert started["address"] == served.episode(handle)
        tools = await call(lobby, "list_tools", episode=handle)
        assert tools["tools"] == started["tools"]
        written: Any = await lobby.call_tool(
            "call_tool",
            {"episode": handle, "name": "probe__write", "arguments": {"path": "answer.txt", "text": "42"}},
        )
        assert written.content[0].text == "written"
        assert (await call(lobby, "episode_status", episode=handle))["calls"] == 1
        assert (await call(lobby, "claim_done", episode=handle, answer="done"))["claimed"]
        assert (await call(lobby, "evaluate", episode=handle))["reward"] == 1.0
        assert (await call(lobby, "close_episode", episode=handle))["closed"]


async def test_status_says_that_a_claimed_attempt_waits_for_the_disk(served: Served) -> None:
    async with connected(served.lobby) as lobby:
        handle = (await call(lobby, "start_episode", task="find-answer"))["episode"]
        served.find(handle).waits_for_room = True
        status = await call(lobby, "episode_status", episode=handle)
        assert status["waits_for"] == "space on the server's disk"
        await call(lobby, "close_episode", episode=handle)


async def test_without_a_session_the_tool_list_never_changes(served: Served) -> None:
    async with connected(served.lobby, "sessionless") as lobby:
        before = [tool.name for tool in (await lobby.list_tools()).tools]
        handle = (await call(lobby, "start_episode", task="find-answer"))["episode"]
        after = [tool.name for tool in (await lobby.list_tools(cache_mode="refresh")).tools]
        await call(lobby, "close_episode", episode=handle)
    assert before == after
    assert before[0] == "list_tasks"


async def test_a_closed_episodes_tools_are_not_listed_any_more(served: Served) -> None:
    changes = anyio.Semaphore(0)

    async def on_message(message: Any) -> None:
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            changes.release()

    async with connected(served.lobby, "handshake", message_handler=on_message) as lobby:
        before = [tool.name for tool in (await lobby.list_tools()).tools]
        handle = (await call(lobby, "start_episode", task="find-answer"))["episode"]
        await changes.acquire()
        assert "probe__echo" in [tool.name for tool in (await lobby.list_tools(cache_mode="refresh")).tools]
        await call(lobby, "close_episode", episode=handle)
        await changes.acquire()
        assert [tool.name for tool in (await lobby.list_tools(cache_mode="refresh")).tools] == before


async def test_every_tool_reports_the_cause_of_a_failed_set_up(served: Served) -> None:
    async with connected(served.lobby) as lobby:
        handle = (await call(lobby, "start_episode", task="failing-preprocess", wait=False))["episode"]
        for tool, arguments in (
            ("list_tools", {}),
            ("call_tool", {"name": "probe__echo"}),
            ("claim_done", {}),
        ):
            with pytest.raises(MCPError) as failed:
                await lobby.call_tool(tool, {"episode": handle, **arguments})
            for phrase in ("exit code 7", "no more disk in the printer"):
                assert phrase in str(failed.value)
        result: Any = await lobby.call_tool("evaluate", {"episode": handle})
        assert result.is_error
        assert result.structured_content["status"] == "set_up_failed"
        assert "reward" not in result.structured_content
    assert served.episodes.admission.active == 0


async def test_an_unknown_tool_is_a_protocol_error(served: Served) -> None:
    async with connected(served.lobby) as lobby:
        with pytest.raises(MCPError, match="there is no tool 'fly'"):
            await lobby.call_tool("fly", {})
        handle = (await call(lobby, "start_episode", task="find-answer"))["episode"]
        assert "no tool 'fly'" in await refused(lobby, "call_tool", episode=handle, name="fly")
        await call(lobby, "close_episode", episode=handle)


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
