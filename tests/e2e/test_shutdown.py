"""Shutdown: how a server stops, and that no processes, containers or files remain."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.types import public_id
from tests.episodes.environment import suite_with
from tests.probe.clients import connected
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in its own process."""

    process: anyio.abc.Process
    url: str
    state: Path

    def task(self, task_id: str) -> str:
        return f"{self.url}/tasks/{task_id}/mcp"


@asynccontextmanager
async def running(
    state: Path, provider: str, *arguments: str, suite: str | Path = SUITE
) -> AsyncGenerator[RunningServer]:
    ready = state.parent / "ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--suite", str(suite), "--port", "0"]
    options = ["--provider", provider, "--state", str(state), "--ready-file", str(ready), *arguments]
    with (state.parent / "log").open("ab") as log:
        process = await anyio.open_process([*command, *options], stdout=subprocess.DEVNULL, stderr=log)
    async with process:
        while not ready.exists() and process.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(0.05)
        yield RunningServer(process, ready.read_text().strip(), state)
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def remaining_after_stop(server: RunningServer, docker: Any) -> list[str]:
    """Wait up to 20 s for processes and containers of the server to end; return those that did not."""
    remaining: list[str] = ["?"]
    with anyio.move_on_after(20):
        while remaining:
            remaining = processes_marked(server.state)
            if docker is not None:
                containers = docker.containers(all=True, filters={"label": "decathlon.owner"})
                names = [name for container in containers for name in container["Names"]]
                ids = [public_id(folder.name) for folder in (server.state / "episodes").iterdir()]
                remaining += [name for name in names if any(each in name for each in ids)]
            await anyio.sleep(0.1 if remaining else 0)
    return remaining


@pytest.fixture
def docker(provider: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("docker_engine") if provider == "docker" else None


async def test_sigterm_finishes_gradings_and_ends_open_attempts(
    tmp_path: Path, provider: str, docker: Any
) -> None:
    async with running(tmp_path / "state", provider) as server:
        async with (
            connected(server.task("find-answer")) as idle,
            connected(server.task("find-answer")) as finished,
        ):
            await idle.call_tool("probe__echo", {"text": ""})
            await finished.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
            await finished.call_tool("claim_done", {})
            server.process.terminate()
            assert await server.process.wait() == 0
        verdicts = [
            json.loads(file.read_text()) for file in (server.state / "episodes").glob("*/verdict.json")
        ]
        assert sorted(verdict["status"] for verdict in verdicts) == ["not_evaluated", "scored"]
        assert [verdict["reward"] for verdict in verdicts if "reward" in verdict] == [1.0]
        assert await remaining_after_stop(server, docker) == []


@pytest.mark.parametrize(("drain_seconds", "signals"), [("2", 1), ("300", 2)], ids=["one", "two"])
async def test_evaluation_that_is_not_waited_for_is_answered_before_its_connection_closes(
    tmp_path: Path, provider: str, drain_seconds: str, signals: int
) -> None:
    state = tmp_path / "state"
    verdicts: list[Any] = []
    suite = suite_with(tmp_path, tasks={})  # with no limit on the time of an evaluation
    async with running(state, provider, "--drain-seconds", drain_seconds, suite=suite) as server:
        async with connected(server.task("slow-verdict")) as client:
            await client.call_tool("claim_done", {})

            async def evaluate() -> None:
                verdicts.append((await client.call_tool("evaluate", {})).structured_content)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(evaluate)
                await anyio.wait_all_tasks_blocked()  # it has been sent
                server.process.send_signal(signal.SIGINT)
                if signals == 2:
                    async with httpx2.AsyncClient() as http:
                        while (await http.get(f"{server.url}/healthz")).json()["status"] != "draining":  # noqa: ASYNC110
                            await anyio.sleep(0.02)
                        body: dict[str, Any] = {
                            "jsonrpc": "2.0",
                            "id": 1,
                            "method": "initialize",
                            "params": {},
                        }
                        response = await http.post(server.task("find-answer"), json=body)
                    assert "shutting down" in response.json()["error"]["message"], "no episode starts"
                    server.process.terminate()
                with anyio.fail_after(60):
                    assert await server.process.wait() == 0
    (verdict,) = verdicts
    assert verdict["status"] == "not_evaluated"
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "closed database" not in log


async def test_a_killed_server_leaves_no_process_and_the_next_one_removes_its_files(
    tmp_path: Path, provider: str, docker: Any
) -> None:
    state = tmp_path / "state"
    async with (
        running(state, provider, "--survive-seconds", "0") as server,
        connected(server.task("find-answer")) as client,
    ):
        await client.call_tool("probe__shell", {"command": "setsid sleep 1000 >/dev/null 2>&1 &"})
        server.process.kill()
        await server.process.wait()
        assert await remaining_after_stop(server, docker) == []
    assert list((state / "scratch").iterdir())
    async with running(state, provider):
        assert len(list((state / "servers").iterdir())) == 1
        assert len(list((state / "scratch").iterdir())) == 1
        for name in ("sandboxes", "namespaces"):
            sandboxes = state / name
            assert not sandboxes.exists() or not [entry for entry in sandboxes.iterdir() if entry.is_dir()]
    assert list((state / "servers").iterdir()) == []
