"""What was played on a real server is in the history of its state folder."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import CallEntry, EpisodeQuery
from decathlon_mcp.protocol.stdio import serve_lines
from decathlon_mcp.settings import read_settings
from decathlon_mcp.types import public_id
from tests.http.messages import INITIALIZE
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
    history = EpisodeHistory([tmp_path])
    evaluate = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "evaluate"}}
    answers: list[bytes] = []

    async def lines() -> AsyncGenerator[bytes]:
        for message in (INITIALIZE, evaluate):
            yield json.dumps(message).encode()

    async def write(line: bytes) -> None:
        assert history.runs().items == ()
        answers.append(line)

    values = {"suite": (SUITE,), "provider": "host", "isolation": "none", "state": tmp_path}
    async with bootstrap(read_settings(values)) as registry:
        labels = {"run": "by-hand"}
        await serve_lines(registry, lines(), write, task="find-answer", labels=labels, finishes=True)
    assert len(answers) == 2
    (run,) = history.runs().items
    assert (run.name, run.counts.finished, run.counts.successes) == ("by-hand", 1, 0)
    (summary,) = history.episodes(EpisodeQuery()).items
    assert (summary.phase, summary.reward, summary.calls) == ("ended", 0.0, 0)
