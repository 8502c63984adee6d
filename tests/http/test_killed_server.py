"""A client of the Python SDK whose server is killed with SIGKILL, and started again by its supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.probe.clients import connected
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize("address", ["mcp", pytest.param("tasks/find-answer/mcp", marks=pytest.mark.long)])
async def test_call_in_flight_at_a_kill_returns_its_result(tmp_path: Path, address: str) -> None:
    async with (
        supervised_server(tmp_path / "state") as server,
        connected(f"{server.url}/{address}") as client,
    ):
        if address == "mcp":
            await client.call_tool("start_episode", {"task": "find-answer"})
        replies: list[Any] = []

        async def call(command: str) -> None:
            replies.append(await client.call_tool("probe__shell", {"command": command}))

        await call("true")
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(call, f"echo run >> runs{number}; sleep 2; wc -l < runs{number}")
                await anyio.sleep(1)
                await server.kill()
            await call("echo later")
        assert [reply.content[0].text for reply in replies[1:]] == ["1\n"] * 4 + ["later\n"]
