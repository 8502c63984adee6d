"""Draws by every way in: the random address, `start_episode`, `list_tasks` with a sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from decathlon_mcp.http.authentication import Tokens
from tests.http.test_addresses import BOTH, INITIALIZE
from tests.probe.clients import connected
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

PASSES = {"find-answer": "++", "made-answer": "+-", "say-answer": "+---", "dense": "--"}
WALK = ["find-answer", "made-answer", "say-answer", "dense"]
"""From easy to hard; of the others nothing is known."""


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
    tokens = state / "tokens.txt"
    tokens.write_text("".join(f"{name} {digest_of(name)} player\n" for name in ("ada", "ben")))
    async with serving(state, tokens=Tokens.read(tokens), provider="local", results=results) as served:
        yield served


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


async def at_random(served: Served, query: str, era: str = "handshake", token: str = "ada") -> str:
    """The task that the address draws."""
    async with connected(f"{served.task('random')}?{query}", era, token=token):
        return served.episodes.live[-1].task_name


async def refusal(served: Served, query: str) -> dict[str, Any]:
    headers = {**BOTH, "Authorization": "Bearer ada"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
        answer = await http.post(f"{served.task('random')}?{query}", json=INITIALIZE)
    assert answer.status_code == 400
    return answer.json()["error"]


async def test_the_address_draws_of_what_is_asked_for_and_the_same_for_the_same_seed(served: Served) -> None:
    draw_tasks = [
        await at_random(served, "seed=7&split=train&search=answer&without=network") for _ in range(2)
    ]
    assert draw_tasks[0] == draw_tasks[1]
    assert "answer" in draw_tasks[0]
    assert await at_random(served, "split=test&needs=probe,late") == "late-server"
    assert await at_random(served, "needs=probe&needs=late") == "late-server"


async def test_with_an_order_the_seed_is_the_place_in_it(served: Served) -> None:
    assert await at_random(served, "order=easy_first&seed=0") == "find-answer"
    assert await at_random(served, "order=easy_first&seed=2") == "say-answer"
    assert await at_random(served, "order=hard_first&seed=0") == "dense"
    assert await at_random(served, "order=curriculum&seed=3") == "find-answer"


@pytest.mark.parametrize("era", ["handshake", "sessionless"])
async def test_without_a_seed_an_order_is_gone_through_by_each_token_for_itself(
    served: Served, era: str
) -> None:
    query = f"order=easy_first&min_pass_rate=0&search={'-' if era == 'handshake' else 'e'}"
    mine = [await at_random(served, query, era) for _ in range(2)]
    others = await at_random(served, query, era, token="ben")
    mine.append(await at_random(served, query, era))
    assert mine[:2] == [name for name in WALK if ("-" if era == "handshake" else "e") in name][:2]
    assert others == mine[0]
    assert len({*mine}) == 3


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("split=nowhere", "there is no split 'nowhere'; the splits are test, train"),
        ("order=sideways", "'easy_first', 'hard_first' or 'curriculum'"),
        ("needs=teleport", "no task here needs 'teleport'; what they need is network, credentials, services"),
        ("spilt=train", "`spilt`: extra inputs are not permitted; it takes `split`, `needs`, `without`"),
        ("seed=seven", "`seed`: input should be a valid integer"),
        ("seed=1&seed=2", "`seed`: input should be a valid integer"),
        ("search=nothing", "no task is all of what was asked for"),
        ("min_pass_rate=2", "`min_pass_rate`: input should be less than or equal to 1"),
    ],
)
async def test_what_cannot_be_drawn_by_is_answered_with_what_can(
    served: Served, query: str, words: str
) -> None:
    error = await refusal(served, query)
    assert words in error["message"]
    assert error["data"]["code"] == "bad_request"


async def said(lobby: Any, tool: str, **arguments: Any) -> Any:
    result = await lobby.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


@pytest.mark.parametrize("era", ["handshake", "sessionless"])
async def test_the_lobby_lists_draws_and_starts_by_the_same_words(served: Served, era: str) -> None:
    async with connected(served.lobby, era, token="ada") as lobby:
        listed = (await said(lobby, "list_tasks", order="easy_first", min_pass_rate=0))["tasks"]
        assert [(task["id"], task["pass_rate"]) for task in listed] == list(
            zip(WALK, (1.0, 0.5, 0.25, 0.0), strict=True)
        )
        assert listed[2]["attempts"] == 4
        sample = (await said(lobby, "list_tasks", sample=2, order="easy_first", seed=1, prompts=True))[
            "tasks"
        ]
        assert [task["id"] for task in sample] == WALK[2:]
        assert all(task["prompt"] for task in sample)
        asked = {"split": "train", "needs": ["probe"], "without": ["late", "dead"], "seed": 7}
        (draw_tasks,) = (await said(lobby, "list_tasks", sample=1, **asked))["tasks"]
        started = await said(lobby, "start_episode", wait=False, **asked)
        assert started["task"] == draw_tasks["id"]
        await said(lobby, "close_episode", episode=started["episode"])


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("list_tasks", {"seed": 7}, "`seed` is for a `sample`"),
        ("list_tasks", {"sample": 0}, "`sample`: input should be greater than or equal to 1"),
        ("list_tasks", {"split": "nowhere"}, "the splits are test, train"),
        ("start_episode", {"task": "dense", "seed": 0}, "`task` names one, `seed` would draw one"),
        ("start_episode", {"order": "sideways"}, "'easy_first', 'hard_first' or 'curriculum'"),
        ("start_episode", {"without": ["*"]}, "no task is all of what was asked for"),
    ],
)
async def test_the_lobby_says_what_does_not_go_together(
    served: Served, tool: str, arguments: dict[str, Any], words: str
) -> None:
    async with connected(served.lobby, token="ada") as lobby:
        with pytest.raises(MCPError, match=words):
            await lobby.call_tool(tool, arguments)


async def test_a_full_server_draws_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "order=hard_first&search=dens"
    taken: list[object] = []
    monkeypatch.setattr(served.episodes, "_closing", True)
    monkeypatch.setattr(served.episodes.draws, "take", taken.append)
    async with httpx2.AsyncClient(headers={**BOTH, "Authorization": "Bearer ada"}, timeout=30) as http:
        answer = await http.post(f"{served.task('random')}?{query}", json=INITIALIZE)
    assert answer.status_code == 503
    assert taken == []
