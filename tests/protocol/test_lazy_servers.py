"""Tool lists of episodes that have no sandbox yet, and the calls that wait for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.episodes.state import Phase
from tests.probe.clients import connected
from tests.probe.serving import serving

pytestmark = pytest.mark.anyio

TOOL = "probe__echo"


async def names(client: Any) -> list[str]:
    return [tool.name for tool in (await client.list_tools()).tools]


async def test_tools_are_listed_while_the_episode_is_queued(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"provider": "host", "servers": "lazy", "max_sandboxes": 1}
    async with serving(tmp_path / "state", **settings) as served:
        async with connected(served.lobby, "handshake") as lobby:
            playing = (await lobby.call_tool("start_episode", {"task": "find-answer"})).structured_content
            expected = sorted(tool["name"] for tool in playing["tools"])
            queued: Any = (await lobby.call_tool("start_episode", {"task": "find-answer"})).structured_content
            assert queued["phase"] == "queued"
            assert queued["tools"] == playing["tools"]
            for era in ("handshake", "sessionless"):
                async with connected(queued["address"], era) as client:
                    assert sorted(await names(client)) == expected
            async with connected(served.task("find-answer"), "handshake") as player:
                assert sorted(await names(player)) == expected
                assert [episode.state.phase for episode in served.episodes.live].count(Phase.QUEUED) == 2
            # The first call waits for the sandbox.
            replies: list[str] = []

            async def call() -> None:
                async with connected(queued["address"], "sessionless") as client:
                    result: Any = await client.call_tool(TOOL, {"text": "at last"})
                    replies.append(result.content[0].text)

            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    await lobby.call_tool("close_episode", {"episode": playing["episode"]})
            assert replies == ["at last"]
