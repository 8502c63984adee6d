"""Calls over HTTP: the form of their answers, how they end, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.episodes import calls
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.protocol import requests, responses
from decathlon_mcp.protocol.sessions import Session
from tests.driver.peer import until
from tests.episodes.environment import is_idle
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, META, MODERN
from tests.http.restarting import RawSession, answer_of, events_of, ready_session, restartable
from tests.http.test_health import scrape
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

KNOWN = ("params", "slow", "log")


@dataclass(slots=True)
class Tools:
    """A task's server. `slow` waits until `finish` is set."""

    running: int = 0
    calls: list[FakeCall] = field(default_factory=list[FakeCall])
    cancelled: int = 0
    finish: anyio.Event = field(default_factory=anyio.Event)

    async def params(self, call: FakeCall) -> str:
        return json.dumps(call.params, sort_keys=True)

    async def slow(self, call: FakeCall) -> str:
        self.running += 1
        self.calls.append(call)
        try:
            await self.finish.wait()
        except BaseException:
            self.cancelled += 1
            raise
        return "done"

    async def log(self, call: FakeCall) -> str:
        for level in ("debug", "info", "error"):
            await call.log(f"a message of level {level}", level)
        return "logged"

    def provider(self) -> FakeProvider:
        return FakeProvider(tools={"probe": {name: getattr(self, name) for name in KNOWN}})


@asynccontextmanager
async def serving(tmp_path: Path, tools: Tools) -> AsyncGenerator[Served]:
    async with restartable(tmp_path, tools.provider()) as server:
        yield server.served


def called(name: Any = "probe__params", **members: Any) -> dict[str, Any]:
    """The message of a call. `members` replace those of the message, or of its params."""
    params: dict[str, Any] = {"name": name, "arguments": {"text": "a"}}
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    for key, value in members.items():
        (message if key in ("id", "jsonrpc", "method", "extra") else params)[key.rstrip("_")] = value
    return message


@asynccontextmanager
async def calling(
    http: httpx2.AsyncClient, session: RawSession, tools: Tools, **members: Any
) -> AsyncGenerator[list[httpx2.Response]]:
    """Call `slow`, and wait at the end until the call is answered. Gives the response, once it is there."""
    responses: list[httpx2.Response] = []

    async def call() -> None:
        message = called("probe__slow", **members)
        responses.append(await http.post(session.url, json=message, headers=session.headers))

    async with anyio.create_task_group() as tasks:
        running = tools.running
        tasks.start_soon(call)
        await until(lambda: tools.running > running)
        yield responses


async def at_episode(http: httpx2.AsyncClient, served: Served) -> RawSession:
    """A session at the address of an episode that is ready; the episode does not end with it."""
    await ready_session(http, served)
    return await RawSession.open(http, served.episode(served.episodes.live[-1].id))


async def test_cancelled_notification_reaches_a_call(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        async with calling(http, session, tools, id="5") as responses:
            for request_id in (5, True, None, ["5"], "5"):
                assert tools.cancelled == 0, "5 and '5' are two ids"
                await session.cancel(request_id)
        answer = answer_of(responses[0])
        assert (answer["id"], answer["error"]["code"]) == ("5", -32800)
        # The Python client fails as a whole if a JSON body comes while it closes.
        assert responses[0].headers["content-type"] == "text/event-stream"
        assert tools.cancelled == 1
        assert (await scrape(http, served.url)).total("tool_calls_total", outcome="cancelled") == 1
        assert "params" in await session.call("probe__params", request_id=6)


async def test_delete_ends_the_calls_of_a_session_with_an_answer(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        async with calling(http, session, tools) as responses:
            assert (await http.delete(session.url, headers=session.headers)).status_code == 200
        answer = answer_of(responses[0])
        assert (answer["id"], answer["error"]["code"]) == (7, -32800)
        await until(lambda: tools.cancelled == 1)
        assert served.episodes.live[-1].state.phase is Phase.READY


async def test_log_messages_come_before_the_answer_from_the_level_that_was_set(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with serving(tmp_path, Tools()) as served:
        session = await ready_session(http, served)
        for number, level in enumerate(("debug", "info", "error", "alert"), 10):
            await session.ask("logging/setLevel", {"level": level}, request_id=number)
            params = {"name": "probe__log", "_meta": {"progressToken": number}}
            response = await session.post("tools/call", params, request_id=number + 10)
            messages = [json.loads(event["data"]) for event in events_of(response) if event["data"]]
            assert len(messages) == 4 - ("debug", "info", "error", "alert").index(level)
            assert messages[-1]["result"]["content"][0]["text"] == "logged"
            assert all(message["method"] == "notifications/message" for message in messages[:-1])


async def test_requests_in_flight_with_one_id_get_their_own_answers(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await ready_session(http, served)
        others: list[Any] = []

        async def post(message: Any) -> None:
            others.append(answer_of(await http.post(session.url, json=message, headers=session.headers)))

        async with calling(http, session, tools, id=5) as first, anyio.create_task_group() as tasks:
            tasks.start_soon(post, called("probe__slow", id=5))
            await until(lambda: tools.running == 2)
            await post(called("probe__params", id=5))
            await post(called("probe__params", id="5", arguments={"text": "b"}))
            tools.finish.set()
    texts = [answer["result"]["content"][0]["text"] for answer in others]
    assert [json.loads(text)["arguments"]["text"] for text in texts[:2]] == ["a", "b"]
    assert [answer["id"] for answer in others] == [5, "5", 5]
    assert texts[2] == answer_of(first[0])["result"]["content"][0]["text"] == "done"


async def test_cancelling_an_id_that_is_in_flight_twice_cancels_the_newest(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        async with calling(http, session, tools, id=5) as first:
            async with calling(http, session, tools, id=5, arguments={"text": "b"}) as second:
                await session.cancel(5)
            assert answer_of(second[0])["error"]["code"] == -32800
            assert (tools.cancelled, first) == (1, [])
            tools.finish.set()
        assert answer_of(first[0])["result"]["content"][0]["text"] == "done"


async def test_long_sessionless_call_is_answered_with_events(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "PING_SECONDS", 0.05)
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        await ready_session(http, served)
        headers = {**ACCEPT, "mcp-protocol-version": MODERN, "Mcp-Method": "tools/call"}
        async with http.stream(
            "POST",
            served.episode(served.episodes.live[-1].id),
            json=called("probe__slow", _meta=META),
            headers={**headers, "Mcp-Name": "probe__slow"},
        ) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            lines = [line async for line in lines_until_ping(stream, tools)]
    answer = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    assert answer["result"]["content"][0]["text"] == "done"
    assert answer["result"]["resultType"] == "complete"


async def lines_until_ping(stream: httpx2.Response, tools: Tools) -> AsyncGenerator[str]:
    """The lines of a response; `slow` returns after the second ping."""
    pings = 0
    async for line in stream.aiter_lines():
        pings += line == ": ping"
        if pings == 2:
            tools.finish.set()
        yield line


async def test_call_of_a_client_that_came_back_is_not_joined(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await ready_session(http, served)
        async with session.calling("probe__slow", request_id=5) as (_, lines):
            await until(lambda: tools.running == 1)
        async with (
            session.resuming(lines[0].removeprefix("id: ")) as coming,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(session.call, "probe__slow")
            await until(lambda: tools.running == 2)
            tools.finish.set()
            data = [json.loads(line[6:]) async for line in coming if line.startswith("data: {")]
            assert data[0]["result"]["content"][0]["text"] == "done"


async def test_requests_of_a_session_that_wait_are_bounded(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_WAITING", 2)
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await ready_session(http, served)
        async with calling(http, session, tools, id=5), calling(http, session, tools, id=6):
            response = await session.post("tools/call", {"name": "probe__params"}, request_id=7)
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["data"]["code"] == "at_capacity"
            other = await RawSession.open(http, served.episode(served.episodes.live[-1].id))
            assert "params" in await other.call("probe__params")
            tools.finish.set()
        assert "params" in await session.call("probe__params", request_id=8)


async def test_calls_of_an_episode_that_wait_are_bounded(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_UNANSWERED", 2)
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await ready_session(http, served)
        other = await RawSession.open(http, served.episode(served.episodes.live[-1].id))
        async with calling(http, session, tools, id=5), calling(http, other, tools, id=6):
            third = await other.post("tools/call", {"name": "probe__params"}, request_id=7)
            assert answer_of(third)["error"]["data"]["code"] == "at_capacity"
            tools.finish.set()
        assert "params" in await other.call("probe__params", request_id=8)


@asynccontextmanager
async def connection(served: Served) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx2.URL(served.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        with anyio.fail_after(30):
            yield reader, writer
    finally:
        writer.transport.abort()


def in_bytes(session: RawSession, body: bytes, *headers: str) -> bytes:
    """A POST of a session's client."""
    url = httpx2.URL(session.url)
    all_headers = {**session.headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in all_headers.items()]
    head = "\r\n".join(
        [f"POST {url.path} HTTP/1.1", f"Host: {url.netloc.decode()}", *lines, *headers, "", ""]
    )
    return head.encode() + body


async def test_call_whose_client_leaves_at_once_is_completed(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        episode = served.episodes.live[-1]
        body = json.dumps(called("probe__slow", id=10)).encode()
        async with connection(served) as (_, writer):
            writer.write(in_bytes(session, body))
            await until(lambda: tools.running)
        tools.finish.set()
        await until(lambda: is_idle(episode))
        assert tools.cancelled == 0
        # The client has no reply: the same call, under whatever id, gets it once.
        assert await session.call("probe__slow", request_id=11, text="a") == "done"
        assert episode.calls.sent == 1
        assert await session.call("probe__slow", request_id=11, text="a") == "done"
        assert episode.calls.sent == 2


def waiting(session: RawSession) -> int:
    """The requests of a session that wait for their answers."""
    sessions = [each for each in gc.get_objects() if isinstance(each, Session) and each.id == session.id]
    return sum(len(each.requests) for each in sessions)


async def test_client_that_comes_back_often_leaves_one_request(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_WAITING", 5)
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        async with session.calling("probe__slow", request_id=5) as (_, lines):
            await until(lambda: tools.running == 1)
        for _ in range(12):
            async with session.resuming(lines[0].removeprefix("id: ")):
                pass
            await anyio.sleep(0.02)  # the server notices that it has left
        await until(lambda: waiting(session) == 1)
        assert tools.cancelled == 0
        async with session.resuming(lines[0].removeprefix("id: ")) as coming:
            tools.finish.set()
            assert [line async for line in coming if line.startswith("data: {")]
        await until(lambda: waiting(session) == 0)
        assert is_idle(served.episodes.live[-1])
