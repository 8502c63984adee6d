"""Who can evaluate, by policy, token and address, and what clients that cannot evaluate see."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from decathlon_client.local_server import line_writer, lines_of
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.memory import create_client_server_memory_streams

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.protocol.stdio import serve_lines
from tests.http.messages import tokens_of
from tests.probe.clients import ERAS, connected, start
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROLES = {"ada": "player", "cleo": "controller", "carl": "controller", "root": "admin"}
VERDICT_WORDS = ("reward", "success", "verdict", "evaluator_output", "verdict.json")


@pytest.fixture(scope="module")
async def controlled(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """A server whose policy is `controller`, without tokens."""
    state = tmp_path_factory.mktemp("state")
    async with serving(state, provider="host", reward="controller") as served:
        yield served


@asynccontextmanager
async def with_tokens(folder: Path, **settings: Any) -> AsyncGenerator[Served]:
    tokens = tokens_of(folder, **ROLES)
    async with serving(folder / "state", provider="host", tokens=tokens, **settings) as served:
        yield served


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]


async def assert_cannot_evaluate(client: Client) -> None:
    """`evaluate` is not listed, and calling it fails like calling any tool that does not exist."""
    listed = await names(client)
    assert "evaluate" not in listed
    assert "claim_done" in listed
    with pytest.raises(MCPError, match="there is no tool 'evaluate'") as refused:
        await client.call_tool("evaluate", {})
    with pytest.raises(MCPError, match="there is no tool 'evaluated'") as unknown:
        await client.call_tool("evaluated", {})
    assert refused.value.error.code == unknown.value.error.code
    assert "evaluate" not in str(unknown.value).replace("'evaluated'", "")


async def wait_until_scored(served: Served, episode_id: str) -> None:
    episode = served.find(episode_id)
    await episode.state.reach(Phase.SCORED, Phase.ENDED)


@pytest.mark.parametrize("era", ERAS)
async def test_the_agent_address_plays_and_the_handle_evaluates(controlled: Served, era: str) -> None:
    started = await start(controlled, "find-answer")
    assert started["policy"] == "controller"
    assert started["agent"] != started["episode"]
    assert started["agent_address"] == controlled.episode(started["agent"])
    async with connected(started["agent_address"], era) as agent:
        await assert_cannot_evaluate(agent)
        await agent.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
        closed: Any = await agent.call_tool("claim_done", {"answer": "done"})
        assert "evaluate" not in closed.content[0].text
        await wait_until_scored(controlled, started["episode"])
        await assert_cannot_evaluate(agent)
        late: Any = await agent.call_tool("probe__echo", {"text": "hi"})
        assert "evaluate" not in late.content[0].text
        again: Any = await agent.call_tool("claim_done", {})
        assert not [word for word in VERDICT_WORDS if word in json.dumps(again.model_dump(mode="json"))]
    async with connected(started["address"], era) as controller:
        assert "evaluate" in await names(controller)
        assert (await call(controller, "evaluate"))["reward"] == 1.0
    async with connected(controlled.lobby, era) as lobby:
        assert (await call(lobby, "evaluate", episode=started["episode"]))["reward"] == 1.0
        await call(lobby, "close_episode", episode=started["episode"])


async def test_a_task_session_is_the_agents(controlled: Served) -> None:
    async with connected(controlled.task("find-answer")) as client:
        await assert_cannot_evaluate(client)
        episode = controlled.episodes.live[-1]
        result: Any = client.session.initialize_result
        info = result.meta["decathlon/episode"]
        assert info["id"] == episode.spec.agent_id
        assert info["address"] == controlled.episode(episode.spec.agent_id)
        assert episode.id not in json.dumps(info)


async def test_the_policy_applies_to_in_memory_streams(controlled: Served) -> None:
    registry = controlled.episodes
    async with in_memory_client(registry, task="find-answer") as agent:
        await assert_cannot_evaluate(agent)
    async with in_memory_client(registry) as lobby:
        started = await call(lobby, "start_episode", task="find-answer")
        assert started["agent_address"] is None
        async with in_memory_client(registry, episode=started["agent"]) as agent:
            await assert_cannot_evaluate(agent)
            await agent.call_tool("claim_done", {})
        async with in_memory_client(registry, episode=started["episode"]) as controller:
            assert (await call(controller, "evaluate"))["reward"] == 0.0
        await call(lobby, "close_episode", episode=started["episode"])


@asynccontextmanager
async def in_memory_client(registry: EpisodeRegistry, **options: Any) -> AsyncGenerator[Client]:
    """A client in this process, as `decathlon_client.local_server` has one."""

    class Transport:
        async def __aenter__(self) -> Any:
            return client_streams

        async def __aexit__(self, *_: object) -> None:
            pass

    async with create_client_server_memory_streams() as (client_streams, server_streams):
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                received, sent = server_streams
                await serve_lines(registry, lines_of(received), line_writer(sent), **options)

            tasks.start_soon(serve)
            async with Client(Transport(), mode=ERAS["handshake"]) as client:
                yield client
            tasks.cancel_scope.cancel()


async def test_status_and_lists_contain_neither_verdict_nor_its_path(controlled: Served) -> None:
    async with connected(controlled.lobby) as lobby:
        handle = (await call(lobby, "start_episode", task="find-answer"))["episode"]
        await call(lobby, "evaluate", episode=handle)
        replies = [await call(lobby, "episode_status", episode=handle), await call(lobby, "list_episodes")]
        assert not [word for word in VERDICT_WORDS if word in json.dumps(replies)]
        assert str(controlled.state) not in json.dumps(replies)
        await call(lobby, "close_episode", episode=handle)


async def test_the_log_of_a_server_that_hides_rewards_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "decathlon")
    async with serving(tmp_path, provider="host", reward="meta") as served:
        started = await start(served, "find-answer")
        async with connected(started["address"]) as client:
            await client.call_tool("evaluate", {})
    log = "".join(json.dumps(getattr(record, "fields", {}), default=str) for record in caplog.records)
    assert '"reward"' not in log
    assert "verdict.json" not in log
    assert started["episode"] not in log
    assert started["agent"] not in log


async def test_a_controllers_token_evaluates_and_a_players_token_plays(tmp_path: Path) -> None:
    async with with_tokens(tmp_path, reward="controller") as served:
        async with connected(served.lobby, token="cleo") as lobby:
            assert "evaluate" in await names(lobby)
            started = await call(lobby, "start_episode", task="find-answer")
            async with connected(started["address"], token="cleo") as controller:
                assert "evaluate" in await names(controller)
            assert (await call(lobby, "evaluate", episode=started["episode"]))["reward"] == 0.0
        async with connected(served.lobby, token="ada") as lobby:
            assert "evaluate" not in await names(lobby)
            assert "evaluate" not in (lobby.instructions or "")
            started = await call(lobby, "start_episode", task="find-answer")
            with pytest.raises(MCPError, match="there is no tool 'evaluate'"):
                await lobby.call_tool("evaluate", {"episode": started["episode"]})
            with pytest.raises(MCPError, match="only a controller's token"):
                await lobby.call_tool("claim_done", {"episode": started["episode"], "truncated": True})
            async with connected(started["address"], token="ada") as player:
                await assert_cannot_evaluate(player)
        async with connected(served.lobby, token="root") as lobby:
            assert (await call(lobby, "evaluate", episode=started["episode"]))["reward"] == 0.0


async def test_a_branch_is_not_more_open_than_its_server(tmp_path: Path) -> None:
    """Otherwise one open episode of earlier gives as many evaluations as its player likes."""
    async with with_tokens(tmp_path, survives=True) as served:
        async with connected(served.lobby, token="ada") as lobby:
            first = await call(lobby, "start_episode", task="find-answer")
            await call(lobby, "close_episode", episode=first["episode"])
    async with with_tokens(tmp_path, survives=True, reward="controller") as served:
        branch = {"branch_of": first["episode"], "at": 0}
        async with connected(served.lobby, token="ada") as lobby:
            with pytest.raises(MCPError, match="only a controller's token"):
                await lobby.call_tool("start_episode", branch)
        async with connected(served.lobby, token="root") as lobby:
            assert (await call(lobby, "start_episode", **branch))["policy"] == "visible"


async def test_only_the_agent_address_needs_no_token(tmp_path: Path) -> None:
    """An agent with a token could start other episodes and evaluate guesses there."""
    async with with_tokens(tmp_path) as served:
        async with connected(served.lobby, token="cleo") as lobby:
            started = await call(lobby, "start_episode", task="find-answer")
            for token in (None, "nonsense", "ada", "cleo"):
                async with connected(started["agent_address"], "sessionless", token=token) as agent:
                    await assert_cannot_evaluate(agent)
                    assert (await agent.call_tool("probe__echo", {"text": "hi"})).content[0].text == "hi"  # pyright: ignore
            async with httpx2.AsyncClient() as http:
                statuses = [
                    (await http.post(url, json={})).status_code
                    for url in (
                        started["address"],
                        served.lobby,
                        served.task("find-answer"),
                        served.episode("0" * 48),
                    )
                ]
        assert statuses == [401] * 4
