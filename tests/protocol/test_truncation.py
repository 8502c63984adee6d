"""`truncated` and `turns` of `claim_done`: a client ends an attempt that its agent has not finished."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.probe.clients import connected, refused, start
from tests.probe.serving import SUITE, Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    rubric = "weights: {'turns < 5': 1, success: 2}"
    (suite / "tasks" / "probe" / "find-answer" / "rubric.yaml").write_text(rubric)
    state = tmp_path_factory.mktemp("state")
    async with serving(state, suite=(str(suite),), provider="host", reward="controller") as served:
        yield served


async def test_turns_are_a_metric_if_the_controller_reports_a_count(served: Served) -> None:
    started = await start(served, "find-answer")
    async with connected(served.lobby) as lobby:
        wrong: list[Any] = [-1, 2**53, 10**400, 1.5, "1e400", [1]]
        for turns in wrong:
            assert "`turns`" in await refused(lobby, "claim_done", episode=started["episode"], turns=turns)
        closed: Any = await lobby.call_tool("claim_done", {"episode": started["episode"], "turns": 4})
        assert closed.structured_content["first"]
        evaluated: Any = await lobby.call_tool("evaluate", {"episode": started["episode"]})
    verdict = evaluated.structured_content
    assert verdict["metrics"]["turns"] == 4
    assert (verdict["reward"], verdict["claimed"], verdict["truncated"]) == (1.0, True, False)


async def test_an_agent_cannot_set_truncated_or_turns(served: Served) -> None:
    started = await start(served, "find-answer")
    for address in ("agent_address", "address"):
        async with connected(started[address]) as agent:
            for name in ("truncated", "turns"):
                assert f"unknown argument `{name}`" in await refused(agent, "claim_done", **{name: 1})
