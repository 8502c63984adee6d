"""Shutdown: how a server stops, and that no processes, containers or files remain."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.types import public_id
from tests.episodes.environment import suite_with
from tests.http.messages import INITIALIZE
from tests.probe.clients import connected
from tests.probe.leftovers import processes_marked
from tests.survival.servers import SupervisedServer, supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def remaining_after_stop(server: SupervisedServer, docker: Any) -> list[str]:
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
    async with supervised_server(tmp_path / "state", provider=provider) as server:
        async with (
            connected(f"{server.url}/tasks/find-answer/mcp") as idle,
            connected(f"{server.url}/tasks/find-answer/mcp") as finished,
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


async def test_evaluation_that_is_not_waited_for_is_answered_before_its_connection_closes(
    tmp_path: Path, provider: str
) -> None:
    """A second signal ends the draining."""
    state = tmp_path / "state"
    verdicts: list[Any] = []
    suite = suite_with(tmp_path, tasks={})  # with no limit on the time of an evaluation
    drains = ("--drain-seconds", "300")
    async with supervised_server(state, *drains, provider=provider, suite=str(suite)) as server:
        async with connected(f"{server.url}/tasks/slow-verdict/mcp") as client:
            await client.call_tool("claim_done", {})

            async def evaluate() -> None:
                verdicts.append((await client.call_tool("evaluate", {})).structured_content)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(evaluate)
                await anyio.wait_all_tasks_blocked()  # it has been sent
                server.process.send_signal(signal.SIGINT)
                async with httpx2.AsyncClient() as http:
                    while (await http.get(f"{server.url}/healthz")).json()["status"] != "draining":  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                    response = await http.post(f"{server.url}/tasks/find-answer/mcp", json=INITIALIZE)
                assert "shutting down" in response.json()["error"]["message"], "no episode starts"
                server.process.terminate()
                with anyio.fail_after(60):
                    assert await server.process.wait() == 0
    (verdict,) = verdicts
    assert verdict["status"] == "not_evaluated"
    log = (tmp_path / "state.log").read_text()
    assert "Traceback" not in log
    assert "closed database" not in log
