"""Sessions in the store: who can revive them, what they keep, and when they are deleted."""

from __future__ import annotations

import json
import sqlite3
from base64 import urlsafe_b64encode
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.http import endpoints
from decathlon_mcp.protocol import sessions
from decathlon_mcp.protocol.messages import EventId, Kind
from decathlon_mcp.storage.database import FILE_NAME
from tests.driver.peer import until
from tests.http.messages import ACCEPT, INITIALIZE, TASK, tokens_of
from tests.http.restarting import RawSession, Restartable, answer_of, restartable
from tests.probe.clients import connected
from tests.probe.serving import serving

pytestmark = pytest.mark.anyio


def rows(server: Restartable, table: str = "sessions") -> int:
    """The number of rows in a table of the store."""
    with closing(sqlite3.connect(server.folder / FILE_NAME)) as connection:
        return connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]


async def lobby_session(http: httpx2.AsyncClient, server: Restartable) -> RawSession:
    """A session of the lobby that has started an episode."""
    session = await RawSession.open(http, server.served.lobby)
    await session.ask("tools/call", {"name": "start_episode", "arguments": {"task": TASK}}, request_id=1)
    return session


async def test_tasks_session_goes_on_with_its_episode(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with restartable(tmp_path) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        assert await session.call("probe__echo", request_id=1, text="before") == "before"
        await server.restart()
        assert await session.call("probe__echo", request_id=2, text="after") == "after"
        assert len(server.registry.live) == 1
        assert rows(server) == 1


async def test_lobbys_session_keeps_its_current_episode_and_its_tools(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await lobby_session(http, server)
        await server.restart()
        tools = (await session.ask("tools/list", request_id=2))["result"]["tools"]
        assert "probe__echo" in [tool["name"] for tool in tools]
        assert await session.call("probe__echo", request_id=3, text="after") == "after"
        listed = await session.ask("tools/call", {"name": "list_episodes", "arguments": {}}, request_id=4)
        assert len(listed["result"]["structuredContent"]["episodes"]) == 1


async def test_requests_that_arrive_together_revive_one_session(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        await session.call("probe__echo", request_id=1, text="before")
        for _ in range(2):
            await server.restart()
            assert await get_and_call(session) == (200, [str(number) for number in range(2, 12)])


async def get_and_call(session: RawSession) -> tuple[int, list[str]]:
    """Open the session's stream and make ten calls, all at once. Returns the status and the replies."""
    statuses: list[int] = []
    replies: list[str] = []

    async def listen() -> None:
        headers = {**session.headers, "Accept": "text/event-stream"}
        async with session.http.stream("GET", session.url, headers=headers) as response:
            statuses.append(response.status_code)

    async def call(number: int) -> None:
        replies.append(await session.call("probe__echo", request_id=number, text=str(number)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        for number in range(2, 12):
            tasks.start_soon(call, number)
    return statuses[0], sorted(replies, key=int)


async def test_foreign_token_and_wrong_path_get_the_reply_for_an_unknown_session(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tokens = tokens_of(tmp_path, alice="controller", bob="controller")
    async with restartable(tmp_path, tokens=tokens) as server:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        session = await RawSession.open(http, server.served.task(TASK), **alice)
        await server.restart()

        async def status(url: str, session_id: str, **headers: str) -> tuple[int, str]:
            headers = {**session.headers, **headers, "mcp-session-id": session_id}
            message: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            response = await http.post(url, json=message, headers=headers)
            return response.status_code, response.text

        unknown = await status(session.url, "0" * 32, **alice)
        assert unknown[0] == 404
        assert await status(session.url, session.id, **bob) == unknown
        assert await status(server.served.task("made-answer"), session.id, **alice) == unknown
        assert await status(server.served.lobby, session.id, **alice) == unknown
        assert (await status(session.url, session.id, **alice))[0] == 200
        assert await status(session.url, session.id, **bob) == unknown


async def test_malicious_session_ids_are_unknown(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    session_ids = ("../../store.db", "%2e%2e/x", "a" * 8000, "' OR 1=1 --", "0" * 32, "é", "a\tb")
    async with restartable(tmp_path) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        await server.restart()
        for method, session_id in product(("POST", "GET", "DELETE"), session_ids):
            headers = {**session.headers, "mcp-session-id": session_id.encode("utf-8")}
            response = await http.request(method, session.url, headers=headers, json=INITIALIZE)  # pyright: ignore[reportArgumentType]
            assert response.status_code == 404
        assert rows(server) == 1


def event_id(server: Restartable, kind: str, request_id: Any) -> str:
    return str(EventId(server.store.generation, 0, Kind(kind), request_id))


NO_IDS = ["1", "1.0.last", "1.0.", "9.9.%ff", "1.0.[1]", "1.0." + "9" * 600]
MEMBERS: list[Any] = [
    *([], [3], [3, 0, "call"], ["3", 0, "call", 7], [3, 0, "calls", 7], [3, 0, "call", None]),
    *([3, 0, "call", True], [3, 0, "call", 1.5], [3, 0, "call", "x" * 10_000], [3, 0, "call", "\ud800"]),
    *([3, 0, "call", 7, "a" * 1_000], [3, 0, "call", 7, "", False, "b"], {"generation": 3}, "3.0.call.7"),
]


async def test_ids_of_no_event_are_refused(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with restartable(tmp_path) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        await server.restart()
        encoded = [urlsafe_b64encode(json.dumps(members).encode()).decode() for members in MEMBERS]
        for event_id in NO_IDS + encoded:
            response = await session.resume(event_id)
            assert response.status_code == 400, event_id
            assert "Last-Event-ID" in response.json()["error"]["message"]


async def test_first_get_stream_of_a_revived_session_ends_by_itself_once(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "END_STREAM_SECONDS", 0.05)
    async with restartable(tmp_path, grace_seconds=0.2) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        await session.call("probe__echo", request_id=1, text="before")
        await server.restart()
        (episode,) = server.registry.live
        headers = {**session.headers, "Accept": "text/event-stream"}
        assert (await http.get(session.url, headers=headers)).text == ""
        await anyio.sleep(0.4)
        assert episode.state.phase is Phase.READY, "a stream that the server ended is no lost client"
        async with http.stream("GET", session.url, headers=headers):
            await anyio.sleep(0.4)
            assert episode.lease.deadline > anyio.current_time() + 10_000


async def test_sessions_that_nobody_revives_expire(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with restartable(tmp_path, idle_seconds=1) as server:
        await RawSession.open(http, server.served.lobby)
        await RawSession.open(http, server.served.task(TASK))
        (episode,) = server.registry.live
        with episode.lease.hold():
            await server.restart()
            assert rows(server) == 2
            await until(lambda: rows(server) == 1)
            sessions.Sessions(server.registry).end_unused()
            assert rows(server) == 1, "a task's session lasts as long as its episode"
        await episode.state.reach(Phase.ENDED)
        await until(lambda: not rows(server))


async def test_session_whose_episode_is_over_lists_tools_and_refuses_calls(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        await session.call("probe__echo", request_id=1, text="before")
        (episode,) = server.registry.live
        await server.stop()
        episode.close()
        await episode.state.reach(Phase.ENDED)
        await server.start()
        for request_id in (2, 3):
            tools = (await session.ask("tools/list", request_id=request_id))["result"]["tools"]
            assert [tool["name"] for tool in tools] == ["claim_done", "evaluate"]
            params = {"name": "probe__echo", "arguments": {"text": "after"}}
            reply = await session.ask("tools/call", params, request_id=10 + request_id)
            assert "ended" in str(reply) or "over" in str(reply)
            back = answer_of(await session.resume(event_id(server, "list", request_id)))
            assert [tool["name"] for tool in back["result"]["tools"]] == ["claim_done", "evaluate"]
            for kind in ("call", "claim"):
                back = answer_of(await session.resume(event_id(server, kind, 77)))
                assert back["error"]["data"]["code"] == ("unanswered" if request_id == 2 else "episode_ended")
            # The next server does not know the episode at all.
            server.registry.index._episodes.clear()  # pyright: ignore[reportPrivateUsage]
            server.store.write(("DELETE FROM episodes WHERE id = ?", (episode.id,)))
            await server.restart()


SESSION = "mcp-session-id"


async def open_session(http: httpx2.AsyncClient, url: str, token: str | None) -> httpx2.Response:
    authorization = {"authorization": f"Bearer {token}"} if token else {}
    return await http.post(url, json=INITIALIZE, headers={**ACCEPT, **authorization})


async def test_one_token_cannot_take_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(tmp_path, ada="player", bob="player")
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    async with serving(tmp_path, tokens=tokens, provider="host") as served:
        async with httpx2.AsyncClient() as http:
            opened = [await open_session(http, served.lobby, "ada") for _ in range(3)]
            assert [SESSION in response.headers for response in opened] == [True, True, False]
            assert opened[2].json()["error"]["data"]["code"] == "at_capacity"
            assert SESSION in (await open_session(http, served.lobby, "bob")).headers
            ended = {**ACCEPT, "authorization": "Bearer ada"}
            await http.delete(
                served.lobby, headers={**ended, "mcp-session-id": opened[0].headers["mcp-session-id"]}
            )
            assert SESSION in (await open_session(http, served.lobby, "ada")).headers


async def test_sessions_of_a_tokens_agents_are_of_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(tmp_path, ada="player", bob="player")
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 4)
    async with serving(tmp_path, tokens=tokens, provider="host") as served:
        async with connected(served.lobby, token="ada") as ada, httpx2.AsyncClient() as http:
            agents: list[str] = []
            for _ in range(2):
                reply: Any = await ada.call_tool("start_episode", {"task": "find-answer", "wait": False})
                agents.append(reply.structured_content["agent_address"])
            opened = [await open_session(http, agents[number % 2], None) for number in range(3)]
            assert [SESSION in response.headers for response in opened] == [True, True, False]
            assert SESSION in (await open_session(http, served.lobby, "bob")).headers
            await http.delete(agents[0], headers={SESSION: opened[0].headers[SESSION]})
            assert SESSION in (await open_session(http, agents[1], None)).headers


async def test_an_agent_without_a_token_cannot_take_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_AGENT_SESSIONS", 2)
    tokens = tokens_of(tmp_path, ada="player")
    async with serving(tmp_path, tokens=tokens, provider="host") as served:
        async with connected(served.lobby, token="ada") as ada, httpx2.AsyncClient() as http:
            reply: Any = await ada.call_tool("start_episode", {"task": "find-answer"})
            started = reply.structured_content
            opened = [await open_session(http, started["agent_address"], None) for _ in range(3)]
            assert [SESSION in response.headers for response in opened] == [True, True, False]
            assert SESSION in (await open_session(http, started["address"], "ada")).headers
