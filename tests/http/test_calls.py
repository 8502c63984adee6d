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

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.protocol import requests, responses
from decathlon_mcp.protocol.sessions import Session
from tests.driver.peer import until
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, META, MODERN
from tests.http.restarting import RawSession, answer_of, events_of, ready_session, restartable
from tests.http.test_lost_clients import served_by_fake
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
async def serving(
    tmp_path: Path, tools: Tools, *, store: bool = True, **settings: Any
) -> AsyncGenerator[Served]:
    """A server with or without a store. Without one, answers in sessions are JSON."""
    tmp_path.mkdir(exist_ok=True)  # noqa: ASYNC240
    if store:
        async with restartable(tmp_path, tools.provider(), **settings) as server:
            yield server.served
    else:
        async with served_by_fake(tmp_path, tools.provider(), **settings) as served:
            yield served


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


async def test_session_stays_open_for_three_idle_times_of_calls_only(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    idle_seconds = 0.6
    async with serving(tmp_path, Tools(), idle_seconds=idle_seconds) as served:
        session = await ready_session(http, served)
        end, number = anyio.current_time() + 3 * idle_seconds, 10
        while anyio.current_time() < end:
            number += 1
            await session.call("probe__params", request_id=number)
            await anyio.sleep(0.1)
        assert (await session.ask("tools/list", request_id=2))["result"]["tools"]


@pytest.mark.parametrize("store", [True, False], ids=["store", "no store"])
async def test_cancelled_notification_reaches_a_call(
    tmp_path: Path, http: httpx2.AsyncClient, store: bool
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools, store=store) as served:
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


async def test_log_messages_of_a_call_answered_with_json_are_on_the_get_stream(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with serving(tmp_path, Tools(), store=False) as served:
        session = await ready_session(http, served)
        headers = {**session.headers, "Accept": "text/event-stream"}
        async with http.stream("GET", session.url, headers=headers) as stream:
            assert await session.call("probe__log", request_id=5) == "logged"
            lines = stream.aiter_lines()
            levels: list[str] = []
            while len(levels) < 3:
                if (line := await anext(lines)).startswith("data: {"):
                    levels.append(json.loads(line[6:])["params"]["level"])
        assert levels == ["debug", "info", "error"]


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
        assert not served.episodes.live[-1].lease._holders  # pyright: ignore[reportPrivateUsage]


def waiting(session: RawSession) -> int:
    """The requests of a session that wait for their answers."""
    sessions = [each for each in gc.get_objects() if isinstance(each, Session) and each.id == session.id]
    return sum(len(each.requests) for each in sessions)


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


async def test_progress_is_under_the_token_of_the_request_that_asked_for_it(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        meta = {"progressToken": "mine", "decathlon/operation": "one"}
        params: dict[str, Any] = {"name": "probe__slow", "arguments": {}, "_meta": meta}
        message = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params}
        async with http.stream("POST", session.url, json=message, headers=session.headers) as stream:
            lines = aiter(stream.aiter_lines())
            first = (await anext(lines)).removeprefix("id: ")
            await until(lambda: tools.running == 1)
        # A session that repeats the call did not ask for progress.
        other = await RawSession.open(http, session.url)
        await until(lambda: waiting(session) == 1)
        del meta["progressToken"]
        async with (
            http.stream("POST", other.url, json={**message, "id": 6}, headers=other.headers) as joined,
            session.resuming(first) as back,
        ):
            await until(lambda: waiting(other) == 1)
            await tools.calls[0].progress(1)
            tools.finish.set()
            answers = [
                [json.loads(line[6:]) async for line in each if line.startswith("data: {")]
                for each in (joined.aiter_lines(), back)
            ]
    assert tools.running == 1
    assert [message.get("method") for message in answers[0]] == [None]
    assert [message.get("params", {}).get("progressToken") for message in answers[1]] == ["mine", None]


def in_bytes(session: RawSession, body: bytes, *headers: str) -> bytes:
    """A POST of a session's client."""
    url = httpx2.URL(session.url)
    all_headers = {**session.headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in all_headers.items()]
    head = "\r\n".join(
        [f"POST {url.path} HTTP/1.1", f"Host: {url.netloc.decode()}", *lines, *headers, "", ""]
    )
    return head.encode() + body


def call_in_bytes(session: RawSession, request_id: int, *headers: str, text: str = "a") -> bytes:
    body = json.dumps(called(id=request_id, arguments={"text": text})).encode()
    return in_bytes(session, body, *headers)


@asynccontextmanager
async def connection(served: Served) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx2.URL(served.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        with anyio.fail_after(30):
            yield reader, writer
    finally:
        writer.transport.abort()


async def read_answers(reader: asyncio.StreamReader, count: int) -> list[Any]:
    """The ids of the next answers, all of them streams of events."""
    ids: list[Any] = []
    while len(ids) < count:
        line = await reader.readline()
        assert line, "the server closed the connection"
        if line.startswith(b"data: {"):
            ids.append(json.loads(line[6:])["id"])
    return ids


async def test_requests_in_pieces_and_several_at_once_are_answered_in_their_order(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with serving(tmp_path, Tools()) as served:
        session = await ready_session(http, served)
        async with connection(served) as (reader, writer):
            whole = call_in_bytes(session, 10)
            for start in range(0, len(whole), 50):
                writer.write(whole[start : start + 50])
                await writer.drain()
                await anyio.sleep(0.002)
            assert await read_answers(reader, 1) == [10]
            writer.write(
                b"".join(call_in_bytes(session, number, text=str(number)) for number in (11, 12, 13))
            )
            assert await read_answers(reader, 3) == [11, 12, 13]
            writer.write(call_in_bytes(session, 14, "Expect: 100-continue"))
            assert await read_answers(reader, 1) == [14]
            writer.write(call_in_bytes(session, 15, "Connection: close"))
            assert await read_answers(reader, 1) == [15]
            assert (await reader.read()).endswith(b"0\r\n\r\n")


async def test_request_whose_body_breaks_off_leaves_nothing(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with serving(tmp_path, Tools()) as served:
        session = await ready_session(http, served)
        episode = served.episodes.live[-1]
        async with connection(served) as (_, writer):
            writer.write(call_in_bytes(session, 10)[:-5])
            await writer.drain()
            await anyio.sleep(0.1)
        await session.call("probe__params", request_id=11)
        assert episode.calls.sent == 1


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
        await until(lambda: not episode.lease._holders)  # pyright: ignore[reportPrivateUsage]
        assert tools.cancelled == 0
        # The client has no reply: the same call, under whatever id, gets it once.
        assert await session.call("probe__slow", request_id=11, text="a") == "done"
        assert episode.calls.sent == 1
        assert await session.call("probe__slow", request_id=11, text="a") == "done"
        assert episode.calls.sent == 2
