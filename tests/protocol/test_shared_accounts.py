"""Tasks that share an account run one after the other; clients that wait see what they wait for."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from decathlon_mcp.episodes.state import Phase
from tests.probe.clients import connected, playing, start
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

WAITS = "the account line, which find-answer has"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    with (suite / "suite.yaml").open("a") as file:
        file.write("accounts: {line: [find-answer, say-answer]}\n")
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider="host") as served:
        yield served


async def test_a_waiting_client_gets_progress_and_continues_when_the_account_is_free(
    served: Served,
) -> None:
    first = await start(served, "find-answer")
    second = await start(served, "say-answer", wait=False)
    assert (second["phase"], second["waits_for"]) == ("queued", WAITS)
    messages: list[str | None] = []

    async with connected(served.lobby) as lobby, anyio.create_task_group() as tasks:

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            messages.append(message)
            await close(served, first["episode"])

        async def list_tools() -> None:
            listed: Any = await lobby.call_tool(
                "list_tools", {"episode": second["episode"]}, progress_callback=on_progress
            )
            assert "claim_done" in {tool["name"] for tool in listed.structured_content["tools"]}

        tasks.start_soon(list_tools)
        status: Any = await lobby.call_tool("episode_status", {"episode": second["episode"]})
        assert status.structured_content.get("waits_for", WAITS) == WAITS
    assert messages[0] == f"waiting for {WAITS}"
    status = await status_of(served, second["episode"])
    assert (status["phase"], "waits_for" in status) == ("ready", False)
    await close(served, second["episode"])


async def test_initialize_reports_what_the_episode_waits_for(served: Served) -> None:
    async with playing(served, "find-answer", "task"):
        async with connected(served.task("say-answer")) as waiting:
            result: Any = waiting.session.initialize_result
            info = result.meta["decathlon/episode"]
    assert (info["phase"], info["waits_for"]) == ("queued", WAITS)


async def status_of(served: Served, episode: str) -> dict[str, Any]:
    async with connected(served.lobby) as lobby:
        status: Any = await lobby.call_tool("episode_status", {"episode": episode})
    return status.structured_content


async def close(served: Served, episode: str) -> None:
    """End an episode and wait until its account is free for the next test."""
    async with connected(served.lobby) as lobby:
        await lobby.call_tool("close_episode", {"episode": episode})
    await served.find(episode).state.reach(Phase.ENDED)
