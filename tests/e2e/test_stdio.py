"""The server on stdio, for every revision and provider: the process serves one episode or the lobby."""

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


@pytest.fixture(params=["handshake", pytest.param("sessionless", marks=pytest.mark.long)])
def era(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def stdio(state: Path, provider: str, era: str, *options: str) -> AsyncGenerator[Client]:
    command = ["-m", "decathlon_mcp.cli", "stdio", "--suite", SUITE, "--provider", provider]
    parameters = StdioServerParameters(
        command=sys.executable,
        args=[*command, "--state", str(state), *options],
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    async with Client(stdio_client(parameters), mode=ERAS[era]) as client:
        yield client


async def test_with_a_task_the_process_serves_one_episode(tmp_path: Path, provider: str, era: str) -> None:
    async with stdio(tmp_path, provider, era, "--task", "find-answer") as client:
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
        await client.call_tool("claim_done", {})
        verdict: Any = (await client.call_tool("evaluate", {})).structured_content
    assert verdict["reward"] == 1.0
    assert processes_marked(tmp_path) == []


async def test_without_a_task_the_process_serves_the_lobby(tmp_path: Path, provider: str, era: str) -> None:
    async with stdio(tmp_path, provider, era) as client:
        started: Any = (await client.call_tool("start_episode", {"task": "find-answer"})).structured_content
        handle = started["episode"]
        assert started["address"] is None
        if era == "handshake":
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert "probe__write" in names
            await client.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
        else:
            arguments = {"path": "answer.txt", "text": "42"}
            await client.call_tool(
                "call_tool", {"episode": handle, "name": "probe__write", "arguments": arguments}
            )
        verdict: Any = (await client.call_tool("evaluate", {"episode": handle})).structured_content
    assert verdict["reward"] == 1.0


async def test_closing_the_connection_leaves_no_processes_and_no_files(
    tmp_path: Path, provider: str, era: str
) -> None:
    async with stdio(tmp_path, provider, era, "--task", "find-answer") as client:
        await client.call_tool(
            "probe__shell", {"command": "(sleep 1000 & setsid sleep 1000 &) >/dev/null 2>&1"}
        )
    assert processes_marked(tmp_path) == []
    assert not list((tmp_path / "servers").iterdir())
    assert not list((tmp_path / "scratch").iterdir())
