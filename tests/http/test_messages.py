"""Messages over HTTP that other servers refuse, drop or answer with a status: each has an answer here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.driver.peer import until
from tests.fakes.driver import FakeCall, FakeTool
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, INITIALIZE, META, MODERN, TASK
from tests.http.restarting import RawSession, answer_of, events_of, ready_session, restartable
from tests.http.test_lost_clients import served_by_fake
from tests.probe.serving import Served
from tests.protocol.test_messages import UNREADABLE

pytestmark = pytest.mark.anyio


async def echo(call: FakeCall) -> str:
    return json.dumps(call.params, sort_keys=True)


async def long(call: FakeCall) -> str:
    return "x" * ((1 << 20) + 1)


async def endless(call: FakeCall) -> str:
    await anyio.sleep_forever()
    return ""


def provider() -> FakeProvider:
    schema = {"type": "object", "properties": {"text": {"type": "string", "x-mcp-header": "Text"}}}
    tools = {"echo": echo, "long": long, "endless": endless, "routed": FakeTool(echo, schema=schema)}
    return FakeProvider(tools={"probe": tools})


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Served]:
    async with served_by_fake(tmp_path, provider()) as served:
        yield served


async def at_lobby(http: httpx2.AsyncClient, served: Served, **options: Any) -> RawSession:
    return await RawSession.open(http, served.lobby, **options)


async def post(session: RawSession, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {**session.headers, "content-type": "application/json", **headers}
    return await session.http.post(session.url, content=content, headers=all_headers)


async def test_unreadable_request_is_answered_under_its_id(served: Served, http: httpx2.AsyncClient) -> None:
    session = await at_lobby(http, served)
    for (name, text), is_sessionless in product(UNREADABLE.items(), (False, True)):
        headers = {"mcp-protocol-version": MODERN} if is_sessionless else {}
        response = await post(session, text, **headers)
        error = response.json()["error"]
        assert (response.json()["id"], error["code"] in (-32700, -32600, -32602)) == ("a", True), name
        for word in ("pydantic", "dictionary", "Raw", "tuple", "NoneType"):
            assert word not in error["message"]
        # Clients of version 1.x of the Python SDK do not read the body of an error.
        assert is_sessionless or response.status_code == 200


async def test_id_of_another_type_is_an_error_and_not_accepted(
    served: Served, http: httpx2.AsyncClient
) -> None:
    session = await at_lobby(http, served)
    kinds: list[Any] = [None, 5.0, 1.5, True, [], {}]
    for request_id in kinds:
        response = await post(session, {"jsonrpc": "2.0", "id": request_id, "method": "ping"})
        assert response.status_code == 400
        assert (response.json()["id"], response.json()["error"]["code"]) == (None, -32600)
    assert (await session.ask("ping"))["result"] == {}


async def test_unknown_cursor_is_an_error(served: Served, http: httpx2.AsyncClient) -> None:
    session = await RawSession.open(http, served.task(TASK))
    cursors: tuple[Any, ...] = ("1", 5, {}, "")
    for method, cursor in product(("tools/list", "prompts/list"), cursors):
        answer = await session.ask(method, {"cursor": cursor})
        assert answer["error"]["code"] == -32602
        assert "cursor" in answer["error"]["message"]
        assert "result" in await session.ask(method, {"cursor": None}, request_id=8)


def ping(request_id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": "ping"}


async def test_batch_is_answered_in_its_revision(served: Served, http: httpx2.AsyncClient) -> None:
    session = await RawSession.open(http, served.task(TASK), version="2025-03-26")
    call = {"name": "probe__echo", "arguments": {"text": "a"}}
    batch = [
        ping(1),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "b", "method": "tools/call", "params": call},
        {"jsonrpc": "2.0", "id": 3, "method": "nothing"},
        {"id": 4, "method": "ping"},
        {**INITIALIZE, "id": 5},
        5,
    ]
    response = await post(session, batch)
    assert response.headers["content-type"] == "application/json"
    answers = {answer["id"]: answer for answer in response.json()}
    assert set(answers) == {1, "b", 3, 4, 5, None}
    assert answers[1]["result"] == {}
    assert '"text": "a"' in answers["b"]["result"]["content"][0]["text"]
    assert all("error" in answers[key] for key in (3, 4, 5, None))
    only_notifications = await post(session, batch[1:2])
    assert (only_notifications.status_code, only_notifications.content) == (202, b"")
    for refused in ([], [ping(number) for number in range(101)]):
        assert (await post(session, refused)).status_code == 400


def calls(tool: str, count: int) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"name": f"probe__{tool}", "arguments": {}}
    return [
        {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params} for number in range(count)
    ]


async def test_answers_to_a_batch_are_bounded_together(served: Served, http: httpx2.AsyncClient) -> None:
    """They wait for the last of them, and a hundred replies of 4 MiB took 1.6 GB."""
    session = await RawSession.open(http, served.task(TASK), version="2025-03-26")
    response = await post(session, calls("long", 20))
    assert len(response.content) < (16 << 20) + 20_000
    assert {answer["id"] for answer in response.json()} == set(range(20))
    refused = [answer["result"] for answer in response.json() if answer["result"].get("isError")]
    assert len(refused) == 5
    assert "that its batch has left" in refused[0]["content"][0]["text"]


async def test_batches_of_a_session_wait_for_no_more_calls_than_other_requests(
    served: Served, http: httpx2.AsyncClient
) -> None:
    session = await RawSession.open(http, served.task(TASK), version="2025-03-26")
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(post, session, calls("endless", 85))
        await until(lambda: len(served.episodes.live) == 1 and served.episodes.live[0].calls.sent == 255)
        answers = (await post(session, [ping(1), ping(2)])).json()
        assert [("result" in answer, answer.get("error", {}).get("code")) for answer in answers] == [
            (False, -32006),
            (True, None),
        ]
        tasks.cancel_scope.cancel()


async def test_batch_in_another_revision_is_refused(served: Served, http: httpx2.AsyncClient) -> None:
    session = await at_lobby(http, served, version="2025-06-18")
    response = await post(session, [ping(1)], **{"mcp-protocol-version": "2025-06-18"})
    assert response.status_code == 400
    assert "2025-03-26" in response.json()["error"]["message"]


@asynccontextmanager
async def get_stream(session: RawSession) -> AsyncGenerator[httpx2.Response]:
    headers = {**session.headers, "Accept": "text/event-stream"}
    async with session.http.stream("GET", session.url, headers=headers) as stream:
        assert stream.status_code == 200
        yield stream


async def read(stream: httpx2.Response, found: list[str]) -> None:
    """Note the methods of a stream's messages, and its end."""
    async for line in stream.aiter_lines():
        found += [json.loads(line[6:])["method"]] if line.startswith("data: {") else []
    found.append("end")


async def test_session_has_up_to_four_streams_and_messages_go_to_the_newest(
    served: Served, http: httpx2.AsyncClient
) -> None:
    session = await at_lobby(http, served)
    found: list[list[str]] = [[], [], [], []]
    async with get_stream(session) as oldest, get_stream(session) as second, get_stream(session) as third:
        async with anyio.create_task_group() as tasks:
            for number, stream in enumerate((oldest, second, third)):
                tasks.start_soon(read, stream, found[number])
            async with get_stream(session) as newest:
                tasks.start_soon(read, newest, found[3])
                start = {"name": "start_episode", "arguments": {"task": TASK}}
                await session.ask("tools/call", start, request_id=1)
                await until(lambda: bool(found[3]))
                # A fifth ends the oldest, without a fault.
                async with get_stream(session):
                    await until(lambda: bool(found[0]))
                    tasks.cancel_scope.cancel()
    assert found == [["end"], [], [], ["notifications/tools/list_changed"]]


async def test_client_that_closes_only_its_sending_side_gets_its_answer(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async def slow(call: FakeCall) -> str:
        await anyio.sleep(0.3)
        return "late"

    tools = FakeProvider(tools={"probe": {"slow": slow}})
    async with restartable(tmp_path, tools) as server:
        served = server.served
        session = await ready_session(http, served)
        episode = served.episodes.live[-1]
        meta = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": "probe__slow"}
        # With events from the beginning, and with one JSON body.
        for url, headers, params in (
            (session.url, session.headers, {}),
            (served.episode(episode.id), {**ACCEPT, **meta}, {"_meta": META}),
        ):
            message = {"jsonrpc": "2.0", "id": 5, "method": "tools/call"}
            body = json.dumps({**message, "params": {"name": "probe__slow", **params}}).encode()
            received = await half_closed(url, headers, body)
            assert received.count(b'"text":"late"') == 1, received
            assert received.startswith(b"HTTP/1.1 ")


async def half_closed(url: str, headers: dict[str, str], body: bytes) -> bytes:
    """What a client receives that sends a POST, and then no more."""
    parts = httpx2.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    lines = [f"POST {parts.path} HTTP/1.1", f"host: {parts.host}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"content-length: {len(body)}")
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    writer.write_eof()
    with anyio.fail_after(20):
        received = await reader.read()
    writer.close()
    return received


WRONG_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("start_episode", {"task": "find-anwser"}, "find-answer"),
    ("call_tool", {"episode": "x", "name": "y"}, "no such episode"),
    ("list_tasks", {"needs": 5}, "`needs`: must be an array"),
    ("list_tasks", {"prompts": "maybe"}, "`prompts`: must be true or false"),
    ("list_tasks", {"sample": 0}, "`sample`: must be at least 1"),
    ("list_tasks", {"spilt": "x"}, "`spilt`: there is no such field; did you mean split?"),
    ("list_tasks", {"order": "none"}, "`order`: must be one of"),
    ("start_episode", {"launch_time": "yesterday"}, "`launch_time`: must be a date and time"),
    ("episode_status", {}, "`episode`: is required"),
    ("call_tool", {"episode": "x", "name": "y", "arguments": []}, "`arguments`: must be an object"),
]


async def test_arguments_of_the_lobby_are_refused_without_the_words_of_python(
    served: Served, http: httpx2.AsyncClient
) -> None:
    session = await at_lobby(http, served)
    for tool, arguments, words in WRONG_ARGUMENTS:
        answer = await session.ask("tools/call", {"name": tool, "arguments": arguments})
        text = answer["result"]["content"][0]["text"]
        assert words in text
        assert len(text) < 600
        for word in ("tuple", "dictionary", "input should", "pydantic", "nonetype", "literal"):
            assert word not in text.lower()


async def test_name_in_a_header_may_have_spaces_around_it(served: Served, http: httpx2.AsyncClient) -> None:
    url = await episode_of(served, http)
    headers = {**ACCEPT, "mcp-protocol-version": MODERN, "mcp-method": "tools/call"}
    params = {"name": "probe__echo", "arguments": {}, "_meta": META}
    message = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params}
    for name in ("probe__echo", " probe__echo ", "\tprobe__echo", "=?base64?cHJvYmVfX2VjaG8=?="):
        # httpx sends no such header.
        received = await half_closed(url, {**headers, "mcp-name": name}, json.dumps(message).encode())
        head, _, body = received.rpartition(b"\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in head
        assert "result" in json.loads(body)


async def episode_of(served: Served, http: httpx2.AsyncClient) -> str:
    await ready_session(http, served)
    return served.episode(served.episodes.live[-1].id)


async def test_headers_of_a_request_without_a_session_must_agree_with_its_body(
    served: Served, http: httpx2.AsyncClient
) -> None:
    url = await episode_of(served, http)
    headers = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": "probe__routed"}
    headers = {**ACCEPT, **headers, "mcp-param-text": "a"}
    params = {"name": "probe__routed", "arguments": {"text": "a"}, "_meta": META}
    message = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params}
    changes: list[dict[str, str | None]] = [
        *(
            {"mcp-name": "probe__long"},
            {"mcp-name": None},
            {"mcp-method": "tools/list"},
            {"mcp-method": None},
        ),
        *({"mcp-param-text": "b"}, {"mcp-param-text": None}, {"mcp-protocol-version": "2099-01-01"}, {}),
    ]
    for changed in changes:
        sent = {name: value for name, value in (headers | changed).items() if value is not None}
        response = await http.post(url, json=message, headers=sent)
        assert response.json()["id"] == 5
        assert response.json().get("error", {}).get("code") == (-32020 if changed else None), changed
        assert response.status_code == (400 if changed else 200)


@pytest.mark.parametrize(
    ("agent", "is_read"), [("python-httpx2/2.0", False), ("node", True), ("header", True)]
)
async def test_event_over_a_mebibyte_is_sent_to_clients_that_read_it(
    tmp_path: Path, http: httpx2.AsyncClient, agent: str, is_read: bool
) -> None:
    async with restartable(tmp_path, provider()) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        session.headers["user-agent"] = agent
        if agent == "header":
            session.headers["decathlon-large-events"] = "1"
        events = events_of(await session.post("tools/call", {"name": "probe__long"}))
        result = json.loads(events[-1]["data"])["result"]
        assert len(events) == 2
        if is_read:
            assert len(result["content"][0]["text"]) > 1 << 20
        else:
            assert result["isError"]
            assert result["_meta"]["decathlon/error"]["code"] == "limit_exceeded"
        # As one JSON body it has no such limit.
        session.headers["Accept"] = "application/json"
        result = (await session.post("tools/call", {"name": "probe__long"}, request_id=8)).json()["result"]
        assert len(result["content"][0]["text"]) > 1 << 20


async def test_refusals_have_the_id_of_their_request(served: Served, http: httpx2.AsyncClient) -> None:
    session = await at_lobby(http, served)
    for status, headers in (
        (406, {"Accept": "text/html"}),
        (404, {"mcp-session-id": "0" * 32}),
        (406, {"Accept": "application/json", "mcp-protocol-version": MODERN}),
    ):
        response = await post(session, ping("mine"), **headers)
        assert (response.status_code, response.json()["id"]) == (status, "mine")
    del session.headers["mcp-session-id"]
    response = await post(session, ping("mine"))
    assert (response.status_code, response.json()["id"]) == (400, "mine")


async def test_answer_to_a_call_that_is_resumed_and_cancelled_is_an_error(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    begun = anyio.Event()

    async def hang(call: FakeCall) -> str:
        begun.set()
        await anyio.sleep_forever()
        return ""

    async with restartable(tmp_path, FakeProvider(tools={"probe": {"hang": hang}})) as server:
        session = await RawSession.open(http, server.served.task(TASK))
        async with session.calling("probe__hang", request_id=5) as (_, lines):
            await begun.wait()
        await server.restart(leaving_calls=True)
        async with session.resuming(lines[0].removeprefix("id: ")) as coming:
            await session.cancel(5)
            with anyio.fail_after(20):
                data = [json.loads(line[6:]) async for line in coming if line.startswith("data: {")]
        assert [(answer["id"], "error" in answer or answer["result"]["isError"]) for answer in data] == [
            (5, True)
        ]


async def test_initialize_of_a_client_whose_params_are_wrong_is_refused(
    served: Served, http: httpx2.AsyncClient
) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"protocolVersion": 5, "capabilities": {}, "clientInfo": {}},
        {"protocolVersion": "x"},
    ]
    for params in wrong:
        response = await http.post(served.lobby, json={**INITIALIZE, "params": params}, headers=ACCEPT)
        assert answer_of(response)["error"]["code"] == -32602
        assert "mcp-session-id" not in response.headers
