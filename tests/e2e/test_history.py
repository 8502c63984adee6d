"""What was played on a real server is in the history of its state folder."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.protocol.stdio import serve_lines
from decathlon_mcp.settings import read_settings
from tests.http.messages import INITIALIZE
from tests.probe.serving import SUITE

pytestmark = pytest.mark.anyio


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
