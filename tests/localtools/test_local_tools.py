"""Local tools: code of the suite, run by a server that starts when one of them is first called."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from tests.localtools.conftest import SUITE
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving
from tests.storage.trajectories import events

pytestmark = pytest.mark.anyio


@pytest.fixture
async def player(served: Served) -> AsyncGenerator[Player]:
    async with playing(served, "play", "task") as player:
        yield player


def local_servers(served: Served) -> list[int]:
    """Return the ids of the processes that serve local tools for this server's episodes."""
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if str(served.state).encode() in command and b'"tools": {' in command:
            pids.append(int(path.parent.name))
    return pids


def workspace(served: Served) -> Path:
    (path,) = (served.state / "sandboxes").glob("**/workspace")
    return path


async def test_tools_are_described_by_the_suites_own_code(player: Player) -> None:
    tools = {tool.name: tool for tool in (await player.client.list_tools()).tools}
    assert sum(name.startswith("local__") for name in tools) == 10
    shout = tools["local__shout"]
    assert shout.description == "Say it louder."
    assert shout.input_schema == {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer", "minimum": 1}},
        "required": ["text"],
        "additionalProperties": False,
    }
    note = tools["local__take_note"]
    assert note.description == "Write a note.\n\nIt stays in the workspace."
    assert note.input_schema == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "What to write: anything."},
            "page": {"type": "integer", "description": "Where to write it.", "default": 1},
        },
        "additionalProperties": False,
        "required": ["text"],
    }
    assert tools["local__nap"].input_schema["properties"] == {"seconds": {"type": "number", "default": 1}}


async def test_code_that_the_stub_does_not_support_gets_the_real_openai_agents(player: Player) -> None:
    tools = {tool.name: tool for tool in (await player.client.list_tools()).tools}
    assert tools["local__judge"].description == "Judge. It is the real one."
    assert await player.text("local__judge") == "Judge"
    assert await player.text("local__shout", text="still") == "STILL"


async def test_one_server_is_started_by_the_first_calls(served: Served, player: Player) -> None:
    await player.client.list_tools()
    await player.call("long__text", characters=1)
    assert local_servers(served) == []
    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(lambda page=number: player.call("local__take_note", text="x", page=page))
    assert await player.text("local__count") == "[1, 2, 3]", "what is no text becomes one by `str`"
    assert len(local_servers(served)) == 1
    assert len([*workspace(served).glob("note-*.txt")]) == 5


async def test_a_tool_works_in_the_workspace(served: Served, player: Player) -> None:
    assert await player.text("local__shout", text="hello", times=2) == "HELLOHELLO"
    assert (workspace(served) / "shouted.txt").read_text() == "hello"
    assert await player.text("local__take_note", text="there", page=3) == "noted there on page 3"
    assert await player.text("local__read_note", page=3) == "there"


async def test_one_tool_neither_blocks_nor_ends_the_others(served: Served, player: Player) -> None:
    failed = await player.call("local__fail")
    assert failed.is_error
    assert failed.content[0].text == "Error running tool local-fail: no voice left"
    assert await player.text("local__leave") == "Error running tool local-leave: gone"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(player.call, "local__wait_for_a_shout")
        assert await player.text("local__shout", text="quick") == "QUICK"
    died = await player.call("local__die")
    assert died.is_error
    assert "server local ended with exit code 7" in died.content[0].text
    assert await player.text("local__shout", text="again") == "AGAIN"
    event = events(served.episodes.live[-1].trajectory, "call")[-1]
    assert (event["server"], event["tool"], event["name"]) == ("local", "shout", "local__shout")
    # Unlike those of servers, results of local tools are never truncated.
    assert len(await player.text("local__shout", text="a" * 1000, times=150)) == 150_000


async def test_code_that_cannot_be_imported_fails_the_set_up(served: Served) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(MCPError, match="(?s)broken could not be described.*the moon is missing"),
        flatten_subgroups=True,
    ):
        async with playing(served, "broken-code", "task") as player:
            await player.client.list_tools()


async def test_a_task_with_a_tool_without_code_is_not_runnable(served: Served) -> None:
    catalogue = served.episodes.catalogue
    (sentence,) = catalogue.missing_sentences(*catalogue.find("no-code"))
    assert "local tool 'unheard_of'" in sentence
    assert "`local_code`" in sentence


async def test_tool_names_follow_the_configured_spelling(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, suite=(SUITE,), provider="host", names="raw") as served,
        playing(served, "play", "task") as player,
    ):
        assert await player.text("shout", text="x") == "X"
