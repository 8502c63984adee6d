"""A server with few file descriptors."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import httpx2
import pytest

from tests.http.server_process import server_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CLIENTS = 20
DESCRIPTORS = 192


@pytest.mark.long
async def test_episodes_wait_for_descriptors_and_none_fails(tmp_path: Path) -> None:
    options = ("--isolation", "none", "--max-sandboxes", str(CLIENTS), "--max-queue", str(CLIENTS))
    launcher = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    with server_process(tmp_path, *options, launcher=launcher) as server:
        url = f"http://127.0.0.1:{server.port}/episodes"
        phases: list[set[str]] = [set() for _ in range(CLIENTS)]
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=120, limits=limits) as http:

            async def play(number: int) -> None:
                async with http.stream("POST", url, json={"task": "find-answer"}) as response:
                    assert response.status_code == 200, await response.aread()
                    async for line in response.aiter_lines():
                        phases[number].add(str(json.loads(line).get("phase")))
                        if phases[number] & {"ready", "ended"}:
                            return

            with anyio.fail_after(240):
                async with anyio.create_task_group() as tasks:
                    for number in range(CLIENTS):
                        tasks.start_soon(play, number)
        assert all("ready" in seen for seen in phases), phases
        assert sum("queued" in seen for seen in phases) >= CLIENTS // 2
        server.health_seconds()
    log = (tmp_path / "log").read_text()
    assert "open files of the server is 192, 328 are needed" in log
    assert "Too many open files" not in log
    assert "could not be removed" not in log
