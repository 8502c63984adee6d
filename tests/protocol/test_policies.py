"""Who may judge: by policy, by token, by address; and what is told to those who may not."""

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
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.memory import create_client_server_memory_streams

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.protocol.streams import serve_streams
from tests.probe.clients import ERAS, connected, start
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

ROLES = {"ada": "player", "cleo": "controller", "carl": "controller", "root": "admin"}
VERDICTS_WORDS = ("reward", "success", "verdict", "evaluator_output", "verdict.json")


@pytest.fixture(params=["handshake", "sessionless"])
def era(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    """A server whose policy is `controller`, without tokens."""
    state = tmp_path_factory.mktemp("state")
    async with serving(state, provider="local", reward="controller") as served:
        yield served


class Secrets(dict[str, str]):
    """The secret of each name's token."""


@asynccontextmanager
async def with_tokens(folder: Path, **settings: Any) -> AsyncGenerator[tuple[Served, Secrets]]:
    made = {name: new_token(name, role) for name, role in ROLES.items()}  # pyright: ignore[reportArgumentType]
    file = folder / "tokens"
    file.write_text("\n".join(line for _, line in made.values()))
    async with serving(folder / "state", provider="local", tokens=Tokens.read(file), **settings) as served:
        yield served, Secrets({name: secret for name, (secret, _) in made.items()})


async def said(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]


async def cannot_judge(client: Client) -> None:
    """There is no `evaluate` here, and calling it is as calling any tool that is not there."""
    listed = await names(client)
    assert "evaluate" not in listed
    assert "claim_done" in listed
    with pytest.raises(MCPError, match="there is no tool 'evaluate'") as refused:
        await client.call_tool("evaluate", {})
    with pytest.raises(MCPError, match="there is no tool 'evaluated'") as unknown:
        await client.call_tool("evaluated", {})
    assert refused.value.error.code == unknown.value.error.code
    assert "evaluate" not in str(unknown.value).replace("'evaluated'", "")


async def scored(served: Served, episode_id: str) -> None:
    episode = served.episodes._episodes[episode_id]  # pyright: ignore[reportPrivateUsage]
    await episode.state.reach(Phase.SCORED, Phase.ENDED)


async def test_an_agents_address_plays_and_its_handle_judges(guarded: Served, era: str) -> None:
    started = await start(guarded, "find-answer")
    assert started["policy"] == "controller"
    assert started["agent"] != started["episode"]
    assert started["agent_address"] == guarded.episode(started["agent"])
    async with connected(started["agent_address"], era) as agent:
        await cannot_judge(agent)
        await agent.call_tool("probe__write", {"path": "answer.txt", "text": "42"})
        closed: Any = await agent.call_tool("claim_done", {"answer": "done"})
        assert "evaluate" not in closed.content[0].text
        await scored(guarded, started["episode"])
        await cannot_judge(agent)
        late: Any = await agent.call_tool("probe__echo", {"text": "hi"})
        assert "evaluate" not in late.content[0].text
        again: Any = await agent.call_tool("claim_done", {})
        assert not [word for word in VERDICTS_WORDS if word in json.dumps(again.model_dump(mode="json"))]
    async with connected(started["address"], era) as controller:
        assert "evaluate" in await names(controller)
        assert (await said(controller, "evaluate"))["reward"] == 1.0
    async with connected(guarded.lobby, era) as lobby:
        assert (await said(lobby, "evaluate", episode=started["episode"]))["reward"] == 1.0
        await said(lobby, "close_episode", episode=started["episode"])


@pytest.mark.parametrize("policy", ["visible", "meta"])
async def test_an_agents_address_never_judges_whatever_the_policy(tmp_path: Path, policy: str) -> None:
    async with serving(tmp_path, provider="local", reward=policy) as served:
        started = await start(served, "find-answer")
        async with connected(started["agent_address"]) as agent:
            await cannot_judge(agent)
            told = (await agent.call_tool("claim_done", {})).content
            assert "evaluate" not in str(told)
        async with connected(started["address"]) as other:
            assert not (await other.call_tool("evaluate", {})).is_error


async def test_an_agents_id_is_no_handle_in_the_lobby(guarded: Served, era: str) -> None:
    started = await start(guarded, "find-answer")
    async with connected(guarded.lobby, era) as lobby:
        for tool in ("episode_status", "list_tools", "claim_done", "evaluate", "close_episode"):
            with pytest.raises(MCPError, match="no such episode"):
                await lobby.call_tool(tool, {"episode": started["agent"]})
        await said(lobby, "close_episode", episode=started["episode"])


async def test_a_session_that_is_the_episode_is_its_agents(guarded: Served) -> None:
    async with connected(guarded.task("find-answer")) as client:
        await cannot_judge(client)
        episode = guarded.episodes.live[-1]
        told: Any = client.session.initialize_result
        told = told.meta["decathlon/episode"]
        assert told["id"] == episode.agent_id
        assert told["address"] == guarded.episode(episode.agent_id)
        assert episode.id not in json.dumps(told)


async def test_over_pipes_it_is_the_same(guarded: Served) -> None:
    episodes = guarded.episodes
    async with piped(episodes, task="find-answer") as agent:
        await cannot_judge(agent)
    async with piped(episodes) as lobby:
        started = await said(lobby, "start_episode", task="find-answer")
        assert started["agent_address"] is None
        async with piped(episodes, episode=started["agent"]) as agent:
            await cannot_judge(agent)
            await agent.call_tool("claim_done", {})
        async with piped(episodes, episode=started["episode"]) as controller:
            assert (await said(controller, "evaluate"))["reward"] == 0.0
        await said(lobby, "close_episode", episode=started["episode"])


@asynccontextmanager
async def piped(episodes: EpisodeRegistry, **options: Any) -> AsyncGenerator[Client]:
    """A client in this process, as an embedded one is."""

    class Pipe:
        async def __aenter__(self) -> Any:
            return near

        async def __aexit__(self, *_: object) -> None:
            pass

    async with create_client_server_memory_streams() as (near, far):
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                await serve_streams(episodes, *far, **options)

            tasks.start_soon(serve)
            async with Client(Pipe(), mode=ERAS["handshake"]) as client:
                yield client
            tasks.cancel_scope.cancel()


async def test_an_episode_can_be_stricter_than_its_server_and_not_more_open(
    guarded: Served, tmp_path: Path
) -> None:
    async with connected(guarded.lobby) as lobby:
        for policy in ("visible", "meta"):
            with pytest.raises(MCPError, match="only a controller's token"):
                await lobby.call_tool("start_episode", {"task": "find-answer", "policy": policy})
        with pytest.raises(MCPError, match="`policy`"):
            await lobby.call_tool("start_episode", {"task": "find-answer", "policy": "open"})
    async with serving(tmp_path, provider="local") as served:
        started = await start(served, "find-answer", policy="meta")
        async with connected(started["address"]) as client:
            result: Any = await client.call_tool("evaluate", {})
        assert result.structured_content is None
        assert result.meta["decathlon/verdict"]["reward"] == 0.0


async def test_status_and_lists_tell_no_verdict_and_no_path_of_one(guarded: Served) -> None:
    async with connected(guarded.lobby) as lobby:
        handle = (await said(lobby, "start_episode", task="find-answer"))["episode"]
        await said(lobby, "evaluate", episode=handle)
        told = [await said(lobby, "episode_status", episode=handle), await said(lobby, "list_episodes")]
        assert not [word for word in VERDICTS_WORDS if word in json.dumps(told)]
        assert str(guarded.state) not in json.dumps(told)
        await said(lobby, "close_episode", episode=handle)


@pytest.mark.parametrize("policy", ["visible", "meta", "controller"])
async def test_the_log_tells_the_reward_only_where_everybody_may_see_it(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "decathlon")
    async with serving(tmp_path, provider="local", reward=policy) as served:
        started = await start(served, "find-answer")
        async with connected(started["address"]) as client:
            await client.call_tool("evaluate", {})
    told = "".join(json.dumps(getattr(record, "fields", {}), default=str) for record in caplog.records)
    assert ('"reward"' in told) is (policy == "visible")
    assert "verdict.json" not in told
    assert started["episode"] not in told
    assert started["agent"] not in told


async def test_with_tokens_a_controllers_judges_and_a_players_plays(tmp_path: Path, era: str) -> None:
    async with with_tokens(tmp_path, reward="controller") as (served, secrets):
        async with connected(served.lobby, era, token=secrets["cleo"]) as lobby:
            assert "evaluate" in await names(lobby)
            started = await said(lobby, "start_episode", task="find-answer")
            async with connected(started["address"], era, token=secrets["cleo"]) as controller:
                assert "evaluate" in await names(controller)
            assert (await said(lobby, "evaluate", episode=started["episode"]))["reward"] == 0.0
        async with connected(served.lobby, era, token=secrets["ada"]) as lobby:
            assert "evaluate" not in await names(lobby)
            assert "evaluate" not in (lobby.instructions or "")
            started = await said(lobby, "start_episode", task="find-answer")
            with pytest.raises(MCPError, match="there is no tool 'evaluate'"):
                await lobby.call_tool("evaluate", {"episode": started["episode"]})
            with pytest.raises(MCPError, match="only a controller's token"):
                await lobby.call_tool("claim_done", {"episode": started["episode"], "truncated": True})
            async with connected(started["address"], era, token=secrets["ada"]) as player:
                await cannot_judge(player)
        async with connected(served.lobby, era, token=secrets["root"]) as lobby:
            assert (await said(lobby, "evaluate", episode=started["episode"]))["reward"] == 0.0


async def test_with_tokens_a_session_that_is_the_episode_judges_by_its_role(tmp_path: Path) -> None:
    async with with_tokens(tmp_path, reward="controller") as (served, secrets):
        async with connected(served.task("find-answer"), token=secrets["ada"]) as player:
            await cannot_judge(player)
        async with connected(served.task("find-answer"), token=secrets["cleo"]) as controller:
            assert (await said(controller, "evaluate"))["reward"] == 0.0


async def test_another_controllers_token_does_not_judge_what_is_not_its_own(tmp_path: Path) -> None:
    async with with_tokens(tmp_path, reward="controller") as (served, secrets):
        async with connected(served.lobby, token=secrets["cleo"]) as lobby:
            handle = (await said(lobby, "start_episode", task="find-answer"))["episode"]
        async with connected(served.lobby, token=secrets["carl"]) as lobby:
            with pytest.raises(MCPError, match="no such episode"):
                await lobby.call_tool("evaluate", {"episode": handle})


async def test_a_players_token_does_not_judge_an_episode_it_made_a_controllers(tmp_path: Path) -> None:
    async with with_tokens(tmp_path) as (served, secrets):
        async with connected(served.lobby, token=secrets["ada"]) as lobby:
            started = await said(lobby, "start_episode", task="find-answer", policy="controller")
            with pytest.raises(MCPError, match="only a controller's token may evaluate"):
                await lobby.call_tool("evaluate", {"episode": started["episode"]})
            with pytest.raises(MCPError, match="only a controller's token may evaluate"):
                await lobby.call_tool("evaluate", {})


async def test_a_controllers_token_may_open_an_episodes_policy(tmp_path: Path) -> None:
    async with with_tokens(tmp_path, reward="controller") as (served, secrets):
        for name, policy in (("cleo", "visible"), ("root", "meta")):
            async with connected(served.lobby, token=secrets[name]) as lobby:
                started = await said(lobby, "start_episode", task="find-answer", policy=policy)
                assert started["policy"] == policy


async def test_an_agents_address_needs_no_token_and_every_other_does(tmp_path: Path) -> None:
    """The capability is the right; a token in an agent's hands could start other episodes."""
    async with with_tokens(tmp_path) as (served, secrets):
        async with connected(served.lobby, token=secrets["cleo"]) as lobby:
            started = await said(lobby, "start_episode", task="find-answer")
            for token in (None, "nonsense", secrets["ada"], secrets["cleo"]):
                async with connected(started["agent_address"], "sessionless", token=token) as agent:
                    await cannot_judge(agent)
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


async def test_who_leaves_an_agents_address_ends_nothing(guarded: Served) -> None:
    started = await start(guarded, "find-answer")
    async with connected(started["agent_address"]) as agent:
        await agent.call_tool("probe__echo", {"text": "hi"})
    async with connected(started["agent_address"]) as agent:
        assert "probe__echo" in await names(agent)
    async with connected(guarded.lobby) as lobby:
        assert (await said(lobby, "episode_status", episode=started["episode"]))["phase"] == "ready"
        await said(lobby, "close_episode", episode=started["episode"])
