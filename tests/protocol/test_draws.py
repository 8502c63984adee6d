"""Draws by the random address, by `start_episode` and by `list_tasks` with a sample."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from tests.http.messages import ACCEPT, INITIALIZE, tokens_of
from tests.probe.clients import connected, refused
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

PASSES = {"find-answer": "++", "made-answer": "+-", "say-answer": "+---", "dense": "--"}
EASY_FIRST = ["find-answer", "made-answer", "say-answer", "dense"]
"""The tasks with a known pass rate."""


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    state = tmp_path_factory.mktemp("state")
    results = state / "results.jsonl"
    verdicts = [
        {"task": task, "suite": "probe", "success": sign == "+"}
        for task, signs in PASSES.items()
        for sign in signs
    ]
    results.write_text("\n".join(json.dumps(verdict) for verdict in verdicts))
    tokens = tokens_of(state, ada="player", ben="player")
    async with serving(state, tokens=tokens, provider="host", results=results) as served:
        yield served


async def draw(served: Served, query: str, era: str = "handshake", token: str = "ada") -> str:
    """The task that the random address draws."""
    async with connected(f"{served.task('random')}?{query}", era, token=token):
        return served.episodes.live[-1].spec.task_name


async def refused_draw(served: Served, query: str) -> dict[str, Any]:
    headers = {**ACCEPT, "Authorization": "Bearer ada"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
        response = await http.post(f"{served.task('random')}?{query}", json=INITIALIZE)
    assert (response.status_code, response.json()["id"]) == (200, INITIALIZE["id"])
    return response.json()["error"]


async def test_the_random_address_applies_filters_and_repeats_a_seed(served: Served) -> None:
    drawn = [await draw(served, "seed=7&split=train&search=answer&without=network") for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert "answer" in drawn[0]
    assert await draw(served, "split=test&needs=probe,late") == "late-server"
    assert await draw(served, "needs=probe&needs=late") == "late-server"


async def test_without_a_seed_each_token_walks_through_an_order_independently(served: Served) -> None:
    query = "order=easy_first&min_pass_rate=0&search=e"
    own = [await draw(served, query, era) for era in ("handshake", "sessionless")]
    other = await draw(served, query, token="ben")
    own.append(await draw(served, query))
    assert own[:2] == [name for name in EASY_FIRST if "e" in name][:2]
    assert other == own[0]
    assert len({*own}) == 3


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("split=nowhere", "there is no split 'nowhere'; the splits are test, train"),
        ("order=sideways", "'easy_first', 'hard_first' or 'curriculum'"),
        ("needs=teleport", "no task here needs 'teleport'; what they need is network, credentials, services"),
        ("spilt=train", "`spilt`: there is no such field; did you mean split?; it takes `split`, `needs`"),
        ("seed=1&seed=2", "`seed`: must be an integer"),
        ("search=nothing", "no task fits all of the filters"),
        ("min_pass_rate=2", "`min_pass_rate`: must be at most 1"),
    ],
)
async def test_invalid_filters_are_refused_with_the_valid_ones(
    served: Served, query: str, message: str
) -> None:
    error = await refused_draw(served, query)
    assert message in error["message"]
    assert error["data"]["code"] == "bad_request"


async def call(lobby: Any, tool: str, **arguments: Any) -> Any:
    result = await lobby.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def test_the_lobby_lists_samples_and_starts_with_the_same_filters(served: Served) -> None:
    async with connected(served.lobby, token="ada") as lobby:
        listed = (await call(lobby, "list_tasks", order="easy_first", min_pass_rate=0))["tasks"]
        assert [(task["id"], task["pass_rate"]) for task in listed] == list(
            zip(EASY_FIRST, (1.0, 0.5, 0.25, 0.0), strict=True)
        )
        assert listed[2]["attempts"] == 4
        sample = (await call(lobby, "list_tasks", sample=2, order="easy_first", seed=1, prompts=True))[
            "tasks"
        ]
        assert [task["id"] for task in sample] == EASY_FIRST[2:]
        assert all(task["prompt"] for task in sample)
        filters = {"split": "train", "needs": ["probe"], "without": ["late", "dead"], "seed": 7}
        (task,) = (await call(lobby, "list_tasks", sample=1, **filters))["tasks"]
        started = await call(lobby, "start_episode", wait=False, **filters)
        assert started["task"] == task["id"]
        await call(lobby, "close_episode", episode=started["episode"])


async def graded(served: Served, task: str, answer: str, run: str, token: str = "ada") -> None:
    """Play an episode whose reward depends on the answer, and wait until it has ended."""
    async with connected(served.lobby, token=token) as lobby:
        started = await call(lobby, "start_episode", task=task, labels={"run": run})
        episode = {"episode": started["episode"]}
        await call(lobby, "claim_done", **episode, answer=answer)
        await call(lobby, "evaluate", **episode)
        await call(lobby, "close_episode", **episode)


async def test_pass_rates_of_now_are_of_a_run_and_of_the_last_episodes_of_a_task(served: Served) -> None:
    for answer in ("wrong", "forty-two"):
        await graded(served, "say-answer", answer, "learner")
    await graded(served, "say-answer", "wrong", "other")
    async with connected(served.lobby, token="ada") as lobby:

        async def rates(**filters: Any) -> list[tuple[str, float]]:
            listed = await call(lobby, "list_tasks", min_pass_rate=0, **filters)
            return [(task["id"], task["pass_rate"]) for task in listed["tasks"]]

        assert await rates(pass_rate_run="learner") == [("say-answer", 0.5)]
        assert await rates(pass_rate_run="learner", pass_rate_last=1) == [("say-answer", 1.0)]
        assert await rates(pass_rate_last=2) == [("say-answer", 0.5)]
        drawn = [
            await call(lobby, "list_tasks", sample=3, seed=7, max_pass_rate=0.9, pass_rate_run="learner")
            for _ in range(2)
        ]
        assert drawn[0] == drawn[1]
        assert {task["id"] for task in drawn[0]["tasks"]} == {"say-answer"}
        mastered = {"sample": 1, "max_pass_rate": 0.5, "pass_rate_run": "learner", "pass_rate_last": 1}
        assert "no task fits" in await refused(lobby, "list_tasks", **mastered)
    async with connected(served.lobby, token="ben") as lobby:
        refusal = await refused(lobby, "list_tasks", min_pass_rate=0, pass_rate_run="learner")
        assert "no episode of run 'learner' was graded" in refusal
