"""The server on stdio, for every provider."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.probe.clients import ERAS
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@asynccontextmanager
async def stdio(state: Path, provider: str, *options: str) -> AsyncGenerator[Client]:
    command = ["-m", "decathlon_mcp.cli", "stdio", "--suite", SUITE, "--provider", provider]
    parameters = StdioServerParameters(
        command=sys.executable,
        args=[*command, "--state", str(state), *options],
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    async with Client(stdio_client(parameters), mode=ERAS["handshake"]) as client:
        yield client


async def test_with_a_task_the_process_serves_one_episode_and_leaves_nothing(
    tmp_path: Path, provider: str
) -> None:
    async with stdio(tmp_path, provider, "--task", "find-answer") as client:
        assert client.instructions is not None
        assert "Write the answer, 42" in client.instructions
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names[-2:] == ["claim_done", "evaluate"]
        await client.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
        progress_values: list[float] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            progress_values.append(progress)

        await client.call_tool("probe__count", {"to": 3}, progress_callback=on_progress)
        assert progress_values == [1, 2, 3]
        background = "(sleep 1000 & setsid sleep 1000 &) >/dev/null 2>&1"
        await client.call_tool("probe__shell", {"command": background})
        await client.call_tool("claim_done", {})
        verdict: Any = (await client.call_tool("evaluate", {})).structured_content
    assert verdict["reward"] == 1.0
    assert processes_marked(tmp_path) == []
    assert not list((tmp_path / "servers").iterdir())
    assert not list((tmp_path / "scratch").iterdir())
