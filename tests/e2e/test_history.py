"""What was played on a real server is in the history of its state folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import CallEntry, EpisodeQuery
from decathlon_mcp.types import public_id
from tests.probe.clients import connected
from tests.probe.serving import SUITE, serving

pytestmark = pytest.mark.anyio


async def test_a_played_episode_is_in_its_run_with_its_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host") as served, connected(served.lobby, "handshake") as lobby:
        arguments = {"task": "find-answer", "labels": {"run": "r", "step": "3"}}
        started: Any = await lobby.call_tool("start_episode", arguments)
        handle = started.structured_content["episode"]
        episode = served.find(handle)
        for path in ("wrong.txt", "answer.txt"):
            call = {"name": "probe__write", "arguments": {"path": path, "text": "42"}, "episode": handle}
            await lobby.call_tool("call_tool", call)
        await lobby.call_tool("evaluate", {"episode": handle})
        await lobby.call_tool("close_episode", {"episode": handle})
        await episode.state.reach(Phase.ENDED)
        history = EpisodeHistory([tmp_path])
        (summary,) = history.episodes(EpisodeQuery(run="r")).items
        assert (summary.public_id, summary.task, summary.calls) == (public_id(handle), "find-answer", 2)
        assert (summary.success, summary.reward, summary.status) == (True, 1.0, "scored")
        report = history.run("r")
        assert report is not None
        assert report.summary.counts.success_rate == 1.0
        assert [point.at for point in report.curve] == [3.0]
        details = history.episode(summary.public_id)
        assert details is not None
        assert details.head is not None
        assert details.head["labels"] == summary.labels
        assert details.task_prompt is not None
        assert "Write the answer, 42" in details.task_prompt.raw
        assert details.verdict is not None
        assert details.verdict["episode"] == summary.public_id
        calls = history.calls(summary.public_id, 1, 10)
        assert [call.name for call in calls if isinstance(call, CallEntry)] == ["probe__write"] * 2
        tools = history.tools(summary.public_id)
        assert tools is not None
        assert b"probe__write" in tools
        assert handle not in repr((summary, report, details, calls))


async def test_an_episode_over_stdio_is_in_the_history_once_it_has_ended(tmp_path: Path) -> None:
    parameters = StdioServerParameters(
        command=sys.executable,
        args=[
            *("-m", "decathlon_mcp.cli", "stdio", "--suite", str(SUITE), "--provider", "host"),
            *("--state", str(tmp_path), "--task", "find-answer", "--label", "run=by-hand"),
        ],
        env=dict(os.environ),
    )
    history = EpisodeHistory([tmp_path])
    async with Client(stdio_client(parameters), mode="legacy") as client:
        await client.list_tools()
        await client.call_tool("evaluate", {})
        assert history.runs().items == ()
    (run,) = history.runs().items
    assert (run.name, run.counts.finished, run.counts.successes) == ("by-hand", 1, 0)
    (summary,) = history.episodes(EpisodeQuery()).items
    assert (summary.phase, summary.reward, summary.calls) == ("ended", 0.0, 0)
