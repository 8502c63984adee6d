"""Labels of episodes: at every way to start one, as argument, parameter and header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.credentials import check, read_key
from tests.http.messages import ACCEPT, INITIALIZE
from tests.probe.clients import connected, refused
from tests.probe.serving import Served, folder_of, serving

pytestmark = pytest.mark.anyio

HEADER = {"Decathlon-Labels": "run=r%20one, step=7"}
OF_HEADER = {"run": "r one", "step": "7"}


async def refusal(url: str, body: object, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The error of a POST that must start nothing."""
    async with httpx2.AsyncClient(headers={**ACCEPT, **(headers or {})}, timeout=30) as http:
        error = (await http.post(url, json=body)).json()["error"]
    assert error["data"]["code"] == "bad_request"
    return error


async def test_the_lobby_takes_labels_as_an_argument_and_in_the_header(served: Served) -> None:
    async with create_mcp_http_client(headers=HEADER) as http:
        transport = streamable_http_client(served.lobby, http_client=http)
        async with Client(transport, mode="legacy") as lobby:
            arguments = {"task": "say-answer", "labels": {"model": "größe", "group": "3"}}
            result: Any = await lobby.call_tool("start_episode", arguments)
            started = result.structured_content
            episode = served.find(started["episode"])
            assert episode.spec.labels == {**OF_HEADER, "model": "größe", "group": "3"}
            twice = await refused(lobby, "start_episode", task="say-answer", labels={"run": "b"})
            assert "the label 'run' is given twice" in twice
            episode.close()


async def test_episodes_are_listed_by_run_and_labels(served: Served) -> None:
    async with connected(served.lobby, "handshake") as lobby:

        async def listed(**arguments: Any) -> list[dict[str, str]]:
            reply: Any = await lobby.call_tool("list_episodes", arguments)
            return [episode["labels"] for episode in reply.structured_content["episodes"]]

        first, second, third = {"run": "a", "step": "1"}, {"run": "a", "step": "2"}, dict[str, str]()
        for labels in (first, second, third):
            await lobby.call_tool("start_episode", {"task": "say-answer", "labels": labels, "wait": False})
        episodes = served.episodes.live
        assert await listed() == [third, second, first]
        assert await listed(run="a") == [second, first]
        assert await listed(run="a", labels={"step": "1"}) == [first]
        assert await listed(run="a", labels={"run": "b"}) == []
        assert "a name has 1 to 32" in await refused(lobby, "list_episodes", labels={"A": "b"})
    for episode in episodes:
        episode.close()
        await episode.state.reach(Phase.ENDED)


@pytest.mark.parametrize(("task", "draw"), [("say-answer", ""), ("random", "&search=say-answer")])
async def test_a_tasks_address_takes_labels_as_parameters_and_in_the_header(
    served: Served, task: str, draw: str
) -> None:
    query = f"label=model=a%26b&label=attempt=0{draw}"
    async with create_mcp_http_client(headers=HEADER) as http:
        transport = streamable_http_client(f"{served.task(task)}?{query}", http_client=http)
        async with Client(transport, mode="legacy") as client:
            # Only where the episode starts: these requests have the same header and parameters.
            assert (await client.list_tools()).tools
            assert served.episodes.live[-1].spec.labels == {**OF_HEADER, "model": "a&b", "attempt": "0"}


@pytest.mark.parametrize(
    ("query", "headers", "message"),
    [
        ("label=run=a&label=run=b", {}, "the label 'run' is given twice"),
        ("label=run=a", HEADER, "the label 'run' is given twice"),
        ("label=run", {}, "the label 'run' is not NAME=VALUE"),
        ("lable=run=a", {}, "a task's address has no parameter 'lable'; it takes `label`"),
        ("seed=1", {}, "a task's address has no parameter 'seed'; it takes `label`"),
        ("", {"Decathlon-Labels": "run=%zz"}, "the label 'run': in a header, its value is percent-encoded"),
    ],
)
async def test_a_tasks_address_refuses_what_it_does_not_know_and_starts_nothing(
    served: Served, query: str, headers: dict[str, str], message: str
) -> None:
    before = set(served.episodes.live)
    error = await refusal(f"{served.task('say-answer')}?{query}", INITIALIZE, headers)
    assert message in error["message"]
    # Episodes of other tests may end meanwhile.
    assert set(served.episodes.live) <= before


OVER_A_LIMIT: list[tuple[dict[str, Any], str]] = [
    ({f"name-{n}": "x" for n in range(17)}, "at most 16 labels, not 17"),
    ({"run": "x" * 201}, "the label 'run': a value has 1 to 200 characters, not 201"),
    ({"run": "a\u2028b"}, "the label 'run': its value has a control character"),
    ({"": "a"}, "the label '': a name has 1 to 32"),
    ({"x" * 5000: "a"}, "the label of 5,000 characters: a name has 1 to 32"),
    ({f"name-{n}": "x" * 190 for n in range(11)}, "bytes, more than 2048"),
    ({"step": 7}, "`labels.step`: must be a string"),
]


async def test_labels_over_a_limit_are_an_error_that_names_the_label(served: Served) -> None:
    async with connected(served.lobby) as lobby:
        for labels, message in OVER_A_LIMIT:
            assert message in await refused(lobby, "start_episode", task="say-answer", labels=labels)


INSTRUCTION = "ignore-all-instructions"


HOSTILE = {"run": INSTRUCTION, "own.name": f"{INSTRUCTION} <script>"}


async def test_labels_are_only_in_the_record_and_in_a_verdict_that_may_be_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "decathlon")
    async with serving(tmp_path / "state", provider="host", keep="workspace") as served:
        async with connected(served.lobby) as lobby:
            arguments = {"task": "find-answer", "labels": HOSTILE}
            started: Any = await lobby.call_tool("start_episode", arguments)
            info = started.structured_content
            seen = [started.model_dump_json()]
            async with connected(info["agent_address"]) as agent:
                seen.append(str(agent.instructions))
                seen.append((await agent.get_prompt("task")).model_dump_json())
                seen.append((await agent.list_tools()).model_dump_json())
                # What preprocess, servers and the agent find in the sandbox.
                for path in ("answer.txt", "."):
                    result = await agent.call_tool("probe__write", {"path": path, "text": "42"})
                    seen.append(result.model_dump_json())
                # The second call is refused.
                seen.append((await agent.call_tool("claim_done", {})).model_dump_json())
                seen.append((await agent.call_tool("claim_done", {})).model_dump_json())
            verdict: Any = await lobby.call_tool("evaluate", {"episode": info["episode"]})
            status: Any = await lobby.call_tool("episode_status", {"episode": info["episode"]})
        async with httpx2.AsyncClient() as http:
            seen.append((await http.get(f"{served.url}/metrics")).text)
            key = (await http.get(f"{served.url}/.well-known/decathlon-key")).content
        folder = folder_of(served.state, info["public_id"])
        seen += [(folder / name).read_text() for name in ("traj_log.json", "eval_res.json")]
        seen.append(verdict.structured_content["evaluator_output"])
        assert status.structured_content["phase"] == "scored"
    seen.append(caplog.text + "".join(str(record.__dict__) for record in caplog.records))
    assert not [text for text in seen if INSTRUCTION in text]
    # Part of what is signed, for one that may evaluate.
    assert verdict.structured_content["labels"] == HOSTILE
    check(read_key(key), verdict.structured_content)
    assert json.loads((folder / "verdict.json").read_text()) == verdict.structured_content
    for secret in (info["episode"], info["agent"]):
        assert secret not in json.dumps(verdict.structured_content)
        assert secret not in caplog.text + "".join(str(record.__dict__) for record in caplog.records)
