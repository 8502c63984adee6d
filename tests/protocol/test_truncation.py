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


async def verdict_of(served: Served, handle: str, **claim: Any) -> dict[str, Any]:
    async with connected(served.lobby) as lobby:
        closed: Any = await lobby.call_tool("claim_done", {"episode": handle, **claim})
        assert closed.structured_content["first"]
        verdict: Any = await lobby.call_tool("evaluate", {"episode": handle})
    return verdict.structured_content


@pytest.mark.parametrize(("turns", "reward"), [(4, 1.0), (5, 0.0)])
async def test_turns_are_a_metric_if_the_controller_reports_them(
    served: Served, turns: int, reward: float
) -> None:
    started = await start(served, "find-answer")
    verdict = await verdict_of(served, started["episode"], turns=turns)
    assert verdict["metrics"]["turns"] == turns
    assert (verdict["reward"], verdict["claimed"], verdict["truncated"]) == (reward, True, False)


async def test_turns_that_are_no_count_are_refused(served: Served) -> None:
    started = await start(served, "find-answer")
    async with connected(served.lobby) as lobby:
        wrong: list[Any] = [-1, 2**53, 10**400, 1.5, "1e400", [1]]
        for turns in wrong:
            assert "`turns`" in await refused(lobby, "claim_done", episode=started["episode"], turns=turns)
    verdict = await verdict_of(served, started["episode"], turns=2**53 - 1)
    assert (verdict["status"], verdict["metrics"]["turns"]) == ("scored", 2**53 - 1)


async def test_an_agent_cannot_set_truncated_or_turns(served: Served) -> None:
    started = await start(served, "find-answer")
    for address in ("agent_address", "address"):
        async with connected(started[address]) as agent:
            for name in ("truncated", "turns"):
                assert f"unknown argument `{name}`" in await refused(agent, "claim_done", **{name: 1})
