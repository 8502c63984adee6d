"""Calls that are served without the SDK: clients see what they would see of the SDK."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.protocol import exchanges as exchanges_module
from decathlon_mcp.protocol.exchanges import Exchange
from decathlon_mcp.protocol.recognition import Recognition
from decathlon_mcp.protocol.sdk import SessionTransport
from tests.driver.peer import until
from tests.fakes.driver import FakeCall, FakeTool, ToolError
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT
from tests.http.restarting import RawSession, answer_of, events_of, restartable
from tests.http.test_lost_clients import served_by_fake
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

TASK = "find-answer"
MODERN = "2026-07-28"
PREFIX = "io.modelcontextprotocol/"
META: dict[str, Any] = {PREFIX + "protocolVersion": MODERN, PREFIX + "clientCapabilities": {}}
KNOWN = ("params", "slow", "log", "fail", "refuse", "odd", "long")
IDENTIFIER = re.compile(r"[0-9a-f]{16,}")


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

    async def fail(self, call: FakeCall) -> Any:
        return {"content": [{"type": "text", "text": "failed"}], "isError": True}

    async def refuse(self, call: FakeCall) -> str:
        raise ToolError("refused", call.arguments.get("code", -32602))

    async def odd(self, call: FakeCall) -> Any:
        meta = {"probe/trace": "t", "decathlon/verdict": 1, PREFIX + "serverInfo": "x"}
        content = [
            {"type": "text", "text": "", "frames": [1, None]},
            {"type": "text", "text": "\u2028\n\u00fc"},
        ]
        return {"content": content, "mood": "cheerful", "resultType": "input_required", "_meta": meta}

    async def long(self, call: FakeCall) -> str:
        return "x" * 300_000

    def provider(self) -> FakeProvider:
        property_ = {"type": "string", "x-mcp-header": "Text"}
        schema = {"type": "object", "properties": {"text": property_}}
        routed = FakeTool(self.params, schema=schema)
        plain = {name: getattr(self, name) for name in KNOWN}
        return FakeProvider(tools={"probe": {**plain, "routed": routed}})


@asynccontextmanager
async def serving(
    tmp_path: Path, tools: Tools, *, exchanges: bool = True, store: bool = True, **settings: Any
) -> AsyncGenerator[Served]:
    """A server with or without a store. Without one, answers in sessions are JSON."""
    tmp_path.mkdir(exist_ok=True)  # noqa: ASYNC240
    if store:
        async with restartable(tmp_path, tools.provider(), exchanges=exchanges, **settings) as server:
            yield server.served
    else:
        async with served_by_fake(tmp_path, tools.provider(), exchanges=exchanges, **settings) as served:
            yield served


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each POST with access to an episode, whether it was served without the SDK."""
    served: list[bool] = []
    prepare = Recognition.prepare

    def counted(*arguments: Any) -> Any:
        call = prepare(*arguments)
        served.append(call is not None)
        return call

    monkeypatch.setattr(Recognition, "prepare", counted)
    return served


@pytest.fixture
async def http() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=30) as http:
        yield http


async def ready_session(http: httpx2.AsyncClient, served: Served, **options: Any) -> RawSession:
    """A session at a task's address whose episode is ready."""
    session = await RawSession.open(http, served.task(TASK), **options)
    await session.ask("tools/list", request_id=1)
    return session


def called(name: Any = "probe__params", **members: Any) -> dict[str, Any]:
    """The message of a call. `members` replace those of the message, or of its params."""
    params: dict[str, Any] = {"name": name, "arguments": {"text": "a"}}
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    for key, value in members.items():
        (message if key in ("id", "jsonrpc", "method", "extra") else params)[key.rstrip("_")] = value
    return message


@dataclass(frozen=True, slots=True)
class Case:
    """A request. `is_fast`: it is served without the SDK, which is not the same as that it succeeds."""

    body: Any
    is_fast: bool = False
    headers: dict[str, str | None] = field(default_factory=dict[str, "str | None"])

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def raw(arguments: bytes) -> bytes:
    return json.dumps(called(arguments="ARGUMENTS")).encode().replace(b'"ARGUMENTS"', arguments)


def cases_of_bodies() -> Iterator[Case]:
    """Bodies that are alike in both eras; ids differ, because in a session an id names one call."""
    for request_id in (7, "7", "a", "\u00fc", -1, 2**70, 0):
        yield Case(called(id=request_id), is_fast=True)
    odd_ids: tuple[Any, ...] = (None, 1.0, 1.5, True, [], "x" * 200, "x" * 199)
    for request_id in odd_ids:
        yield Case(called(id=request_id), is_fast=request_id == "x" * 199)
    yield Case({key: value for key, value in called().items() if key != "id"})
    for number, arguments in enumerate(({}, None, {"a": [1, {"b": None}], "\u00fc": "\U0001f600"})):
        yield Case(called(id=100 + number, arguments=arguments), is_fast=True)
    no_objects: tuple[Any, ...] = ([], "x", 1, True)
    for arguments in no_objects:
        yield Case(called(arguments=arguments))
    for number, arguments in enumerate(
        (b'{"a": "\\ud83d\\ude00"}', b'{\n "a":\r\n 1}', b'{"a": 12345678901234567890}', b'{"a": 1, "a": 2}')
    ):
        yield Case(raw(arguments).replace(b'"id": 7', b'"id": %d' % (200 + number)), is_fast=True)
    for arguments in (
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": "\n"}',
        b'{"a": 01}',
        b"{a: 1}",
        b'{"a": 1,}',
        b"[" * 200 + b"]" * 200,
        b'{"a": "\\x"}',
    ):
        yield Case(raw(arguments))
    whole = json.dumps(called()).encode()
    for body in (
        b"",
        b"{}",
        b"[]",
        b"null",
        whole + b"x",
        whole[:-1],
        b"[" + whole + b"]",
        b"\xef\xbb\xbf" + whole,
    ):
        yield Case(body)
    for number, name in enumerate((None, 5, "", "probe__none", "evaluat", "x" * 300)):
        yield Case(called(name=name, id=250 + number), is_fast=isinstance(name, str))
    for name in ("fail", "refuse", "odd", "long", "log"):
        yield Case(called(f"probe__{name}", id=f"of {name}"), is_fast=True)
    for code in (-32603, -32001, -32008, -32021, 5):
        yield Case(called("probe__refuse", id=f"code {code}", arguments={"code": code}), is_fast=True)
    yield Case(called(jsonrpc="1.0"))
    yield Case(called(method="tools/calls"))
    yield Case(called(extra=1, id=300))
    yield Case(called(more=1, id=301))


def session_cases() -> Iterator[Case]:
    yield from cases_of_bodies()
    metas: tuple[Any, ...] = (None, [], {"progressToken": 1.5}, {"decathlon/operation": ""})
    for number, meta in enumerate(metas):
        yield Case(called(id=400 + number, _meta=meta), is_fast=False)
    for number, meta in enumerate(
        ({}, {"a/b": 1}, {"progressToken": 5}, {"decathlon/operation": "one", "traceparent": "00"})
    ):
        yield Case(called(id=500 + number, _meta=meta), is_fast=True)
    yield Case(called(id=600, _meta={"decathlon/operation": "one"}, arguments={}), is_fast=True)
    yield Case(called(id=7, arguments={"text": "another call with the same id"}), is_fast=True)
    headers: tuple[tuple[dict[str, str | None], bool], ...] = (
        ({"Host": "evil.example"}, False),
        ({"Host": "localhost"}, True),
        ({"Host": "localhost:1"}, True),
        ({"Host": "localhost.evil.example:1"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://localhost:5"}, False),
        ({"Origin": "null"}, False),
        ({"Accept": "application/json"}, False),
        ({"Accept": "text/event-stream"}, False),
        ({"Accept": "*/*"}, False),
        ({"Accept": "text/event-stream;q=0.5 , application/json"}, True),
        ({"Accept": "text/event-stream, APPLICATION/JSON"}, False),
        ({"Accept": None}, False),
        ({"Content-Type": "text/plain"}, False),
        ({"Content-Type": "application/json; charset=utf-8"}, True),
        ({"Content-Type": "application/jsonp"}, False),
        ({"mcp-protocol-version": None}, True),
        ({"mcp-protocol-version": "2024-11-05"}, True),
        ({"mcp-protocol-version": "2025-11-2"}, False),
        ({"mcp-protocol-version": MODERN}, False),
        ({"mcp-session-id": None}, False),
        ({"mcp-session-id": "0" * 32}, False),
        ({"Mcp-Method": "tools/list"}, True),
    )
    for number, (changed, is_fast) in enumerate(headers):
        yield Case(called(id=700 + number), is_fast, changed)
    yield Case(called("evaluates", id=800), is_fast=True)
    yield Case(called("claim_done", id=801, arguments={"ansver": ""}), is_fast=True)
    yield Case(called("claim_done", id=802, arguments={"answer": 5}), is_fast=True)
    yield Case(called("claim_done", id=803, arguments={}), is_fast=True)
    yield Case(called(id=804), is_fast=True)
    yield Case(called("evaluate", id=805, arguments={"x": 1}), is_fast=True)


def sessionless_cases() -> Iterator[Case]:
    for case in cases_of_bodies():
        body = case.body
        if not isinstance(body, bytes):
            params = {**body["params"], "_meta": META}
            name = params["name"] if isinstance(params["name"], str) else None
            # Of a tool that is not known, the SDK checks which headers it needs.
            is_fast = case.is_fast and str(name).removeprefix("probe__") in KNOWN
            yield Case({**body, "params": params}, is_fast, {"Mcp-Name": name})
        elif b'"arguments": ' in body:
            meta = b'"_meta": %b, "arguments": ' % json.dumps(META).encode()
            yield Case(body.replace(b'"arguments": ', meta), case.is_fast)
        else:
            yield case
    metas: tuple[tuple[Any, bool], ...] = (
        (None, False),
        ({}, False),
        ({PREFIX + "protocolVersion": MODERN}, False),
        ({**META, PREFIX + "protocolVersion": "2025-11-25"}, False),
        ({**META, PREFIX + "clientCapabilities": 5}, True),
        ({**META, PREFIX + "clientInfo": {"name": "x"}, "a/b": 1}, True),
        ({**META, PREFIX + "logLevel": "info"}, True),
        ({**META, "progressToken": 1}, True),
        ({**META, "decathlon/operation": "two"}, True),
        ({**META, "decathlon/operation": 2}, False),
    )
    for meta, is_fast in metas:
        yield Case(called(_meta=meta), is_fast)
        yield Case(called("probe__log", _meta=meta), is_fast, {"Mcp-Name": "probe__log"})
    headers: tuple[dict[str, str | None], ...] = (
        {"Mcp-Name": None},
        {"Mcp-Name": "probe__echo"},
        {"Mcp-Name": "=?base64?cHJvYmVfX3BhcmFtcw==?="},
        {"Mcp-Method": None},
        {"Mcp-Method": "tools/list"},
        {"Mcp-Method": "Tools/call"},
        {"Mcp-Param-Text": "a"},
        {"mcp-protocol-version": "2099-01-01"},
        {"Host": "evil.example"},
        {"Accept": "application/json"},
        {"Content-Type": "text/plain"},
        {"mcp-session-id": "0" * 32},
    )
    for changed in headers:
        yield Case(called(_meta=META), headers=changed)
    for value in ("a", "b", None):
        header: dict[str, str | None] = {"Mcp-Name": "probe__routed", "Mcp-Param-Text": value}
        yield Case(called("probe__routed", _meta=META), headers=header)


async def observed(
    http: httpx2.AsyncClient, url: str, headers: dict[str, str], case: Case, *, with_form: bool
) -> str:
    """What a client sees of the response to a request. `with_form`: whether it is JSON or events."""
    changed = {name.lower(): value for name, value in case.headers.items()}
    all_headers = {
        "content-type": "application/json",
        **{name.lower(): value for name, value in headers.items()},
    }
    sent = {name: value for name, value in {**all_headers, **changed}.items() if value is not None}
    if "accept" not in sent:
        sent["accept"] = ""  # otherwise the client adds one
    response = await http.post(url, content=case.content, headers=sent)
    kind = response.headers.get("content-type", "").partition(";")[0]
    body: Any = response.text
    if kind == "text/event-stream":
        body = [json.loads(event["data"]) for event in events_of(response) if event["data"]]
        body = body if with_form else body[-1]
    elif kind == "application/json" and body:
        body = response.json()
    names = ("allow", "mcp-session-id", "cache-control")[: 3 if with_form else 2]
    seen = [response.status_code, [response.headers.get(name) for name in names], body]
    if with_form:
        seen.append(kind)
    return IDENTIFIER.sub("ID", json.dumps(seen, sort_keys=True))


async def differences(
    http: httpx2.AsyncClient,
    fast: list[bool],
    cases: Iterator[Case],
    targets: list[tuple[str, dict[str, str]]],
    *,
    with_form: bool = True,
) -> list[Any]:
    """The requests that are answered differently by the two servers, or otherwise than expected."""
    different: list[Any] = []
    for case in cases:
        fast.clear()
        one, other = [
            await observed(http, url, headers, case, with_form=with_form) for url, headers in targets
        ]
        if one != other or any(fast) != case.is_fast:
            different.append((case, fast[:], one, other))
    return different


@pytest.mark.parametrize("store", [True, False], ids=["store", "no store"])
async def test_requests_in_a_session_are_answered_as_by_the_sdk(
    tmp_path: Path, http: httpx2.AsyncClient, fast: list[bool], store: bool
) -> None:
    async with AsyncExitStack() as stack:
        targets: list[tuple[str, dict[str, str]]] = []
        for name in ("exchange", "sdk"):
            server = serving(tmp_path / name, Tools(), exchanges=name == "exchange", store=store)
            session = await ready_session(http, await stack.enter_async_context(server))
            targets.append((session.url, session.headers))
        # With a store an exchange's answers are events, without one JSON if nothing comes before.
        assert await differences(http, fast, session_cases(), targets, with_form=False) == []


async def test_requests_without_a_session_are_answered_as_by_the_sdk(
    tmp_path: Path, http: httpx2.AsyncClient, fast: list[bool]
) -> None:
    async with AsyncExitStack() as stack:
        targets: list[tuple[str, dict[str, str]]] = []
        for name in ("exchange", "sdk"):
            server = serving(tmp_path / name, Tools(), exchanges=name == "exchange", store=False)
            served = await stack.enter_async_context(server)
            await ready_session(http, served)
            headers = {**ACCEPT, "mcp-protocol-version": MODERN, "Mcp-Method": "tools/call"}
            targets.append(
                (served.episode(served.episodes.live[-1].id), {**headers, "Mcp-Name": "probe__params"})
            )
        assert await differences(http, fast, sessionless_cases(), targets) == []


@pytest.fixture(params=[True, False], ids=["exchange", "sdk"])
def exchanges(request: pytest.FixtureRequest) -> bool:
    return request.param


STORES = pytest.mark.parametrize("store", [True, False], ids=["store", "no store"])


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
    tmp_path: Path, http: httpx2.AsyncClient, fast: list[bool]
) -> None:
    idle_seconds = 2
    async with serving(tmp_path, Tools(), idle_seconds=idle_seconds) as served:
        session = await ready_session(http, served)
        fast.clear()
        end, number = anyio.current_time() + 3 * idle_seconds, 10
        while anyio.current_time() < end:
            number += 1
            await session.call("probe__params", request_id=number)
        assert all(fast)
        assert (await session.ask("tools/list", request_id=2))["result"]["tools"]


@STORES
async def test_cancelled_notification_reaches_a_call(
    tmp_path: Path, http: httpx2.AsyncClient, exchanges: bool, store: bool
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools, exchanges=exchanges, store=store) as served:
        session = await at_episode(http, served)
        async with calling(http, session, tools, id="5") as responses:
            # For the SDK, 5 and "5" are the same.
            message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}}
            await http.post(session.url, json=message, headers=session.headers)
        answer = answer_of(responses[0])
        assert (answer["id"], answer["error"]["code"]) == ("5", -32800)
        # The Python client fails as a whole if a JSON body comes while it closes.
        assert not exchanges or responses[0].headers["content-type"] == "text/event-stream"
        assert tools.cancelled == 1
        assert "params" in await session.call("probe__params", request_id=6)


@STORES
async def test_delete_ends_the_calls_of_a_session(
    tmp_path: Path, http: httpx2.AsyncClient, exchanges: bool, store: bool
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools, exchanges=exchanges, store=store) as served:
        session = await at_episode(http, served)
        async with calling(http, session, tools) as responses:
            assert (await http.delete(session.url, headers=session.headers)).status_code == 200
        if store and exchanges:
            assert not any(event["data"] for event in events_of(responses[0]))
        else:
            assert responses[0].status_code == 500
            assert "Session terminated" in responses[0].json()["error"]["message"]
        await until(lambda: tools.cancelled == 1)
        assert served.episodes.live[-1].state.phase is Phase.READY


async def test_log_messages_come_before_the_answer_from_the_level_that_was_set(
    tmp_path: Path, http: httpx2.AsyncClient, exchanges: bool
) -> None:
    async with serving(tmp_path, Tools(), exchanges=exchanges) as served:
        session = await ready_session(http, served)
        for number, level in enumerate(("debug", "info", "error", "alert"), 10):
            await session.ask("logging/setLevel", {"level": level}, request_id=number)
            # With a token, also the SDK's answer is a stream of events.
            params = {"name": "probe__log", "_meta": {"progressToken": number}}
            response = await session.post("tools/call", params, request_id=number + 10)
            messages = [json.loads(event["data"]) for event in events_of(response) if event["data"]]
            assert len(messages) == 4 - ("debug", "info", "error", "alert").index(level)
            assert messages[-1]["result"]["content"][0]["text"] == "logged"
            assert all(message["method"] == "notifications/message" for message in messages[:-1])


async def test_log_messages_of_a_call_answered_with_json_are_on_the_get_stream(
    tmp_path: Path, http: httpx2.AsyncClient, exchanges: bool
) -> None:
    async with serving(tmp_path, Tools(), exchanges=exchanges, store=False) as served:
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


@STORES
async def test_two_requests_with_one_id_get_one_answer_each(
    tmp_path: Path, http: httpx2.AsyncClient, store: bool
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools, store=store) as served:
        session = await ready_session(http, served)
        responses: list[httpx2.Response] = []

        async def post(message: Any) -> None:
            responses.append(await http.post(session.url, json=message, headers=session.headers))

        async with calling(http, session, tools, id=5) as first, anyio.create_task_group() as tasks:
            tasks.start_soon(post, called("probe__slow", id=5))
            await post(called("probe__params", id=5))
            tools.finish.set()
    conflict, same = (answer_of(response) for response in responses)
    assert "another" in conflict["error"]["message"]
    assert same == answer_of(first[0])
    assert tools.running == 1


async def test_long_sessionless_call_is_answered_with_events(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges_module, "FAST_SECONDS", 0.02)
    monkeypatch.setattr(exchanges_module, "PING_SECONDS", 0.05)
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


async def test_no_task_remains_of_a_long_call_whose_client_is_gone(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges_module, "FAST_SECONDS", 0.02)
    monkeypatch.setattr(exchanges_module, "PING_SECONDS", 0.05)
    following: list[bool] = []
    watch = Exchange.watch

    async def counted(exchange: Exchange) -> None:
        following.append(True)
        try:
            await watch(exchange)
        finally:
            following.pop()

    monkeypatch.setattr(Exchange, "watch", counted)
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        await ready_session(http, served)
        url = served.episode(served.episodes.live[-1].id)
        headers = {**ACCEPT, "mcp-protocol-version": MODERN, "Mcp-Method": "tools/call"}
        headers["Mcp-Name"] = "probe__slow"
        message = called("probe__slow", _meta=META)
        async with http.stream("POST", url, json=message, headers=headers) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            assert following
        await until(lambda: tools.cancelled == 1 and not following)


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
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools) as served:
        session = await at_episode(http, served)
        async with session.calling("probe__slow", request_id=5) as (_, lines):
            await until(lambda: tools.running == 1)
        for _ in range(exchanges_module.MAX_WAITING + 5):
            async with session.resuming(lines[0].removeprefix("id: ")):
                pass
        await until(lambda: waiting(served, session) == 1)
        assert tools.cancelled == 0
        async with session.resuming(lines[0].removeprefix("id: ")) as coming:
            tools.finish.set()
            assert [line async for line in coming if line.startswith("data: {")]
        await until(lambda: waiting(served, session) == 0)
        assert not served.episodes.live[-1].lease._holders  # pyright: ignore[reportPrivateUsage]


def waiting(served: Served, session: RawSession) -> int:
    """The requests of a session that wait for their answers."""
    transports = [
        transport
        for transport in gc.get_objects()
        if isinstance(transport, SessionTransport) and transport.mcp_session_id == session.id
    ]
    return sum(transport.waiting_requests for transport in transports)


async def test_requests_of_a_session_that_wait_are_bounded(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges_module, "MAX_WAITING", 2)
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
        params = {"name": "probe__slow", "arguments": {}, "_meta": {"progressToken": "mine"}}
        message = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params}
        async with http.stream("POST", session.url, json=message, headers=session.headers) as stream:
            lines = aiter(stream.aiter_lines())
            first = (await anext(lines)).removeprefix("id: ")
            await until(lambda: tools.running == 1)
        # A session that joins the call did not ask for progress.
        other = await RawSession.open(http, session.url)
        await until(lambda: waiting(served, session) == 1)
        async with other.calling("probe__slow", request_id=6) as (joined, _), session.resuming(first) as back:
            await tools.calls[0].progress(1)
            tools.finish.set()
            answers = [
                [json.loads(line[6:]) async for line in each if line.startswith("data: {")]
                for each in (joined, back)
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


@STORES
async def test_call_whose_client_leaves_at_once_is_completed(
    tmp_path: Path, http: httpx2.AsyncClient, store: bool
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools, store=store) as served:
        session = await at_episode(http, served)
        episode = served.episodes.live[-1]
        body = json.dumps(called("probe__slow", id=10)).encode()
        async with connection(served) as (_, writer):
            writer.write(in_bytes(session, body))
            await until(lambda: tools.running)
        tools.finish.set()
        await until(lambda: not episode.lease._holders)  # pyright: ignore[reportPrivateUsage]
        assert tools.cancelled == 0
        # The same request again gets the reply of the first one.
        assert await session.call("probe__slow", request_id=10, text="a") == "done"
        assert episode.calls.sent == 1


async def test_calls_are_counted_as_by_the_sdk(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    def totals(served: Served) -> list[float]:
        registry = served.episodes.metrics.registry
        names = ("request_bytes", "response_bytes")
        values = [registry.get_sample_value(f"decathlon_http_{name}_total") for name in names]
        values.append(registry.get_sample_value("decathlon_http_responses_total", {"status": "200"}))
        return [value for value in values if value is not None]

    async def counted(served: Served, *, answers: int) -> tuple[float, ...]:
        session = await ready_session(http, served)
        before = totals(served)
        for number in range(answers):
            await session.call("probe__params", request_id=number + 10)
        return tuple(after - earlier for after, earlier in zip(totals(served), before, strict=True))

    async with serving(tmp_path / "exchange", Tools(), store=False) as served:
        counted_first = await counted(served, answers=3)
    async with serving(tmp_path / "sdk", Tools(), exchanges=False, store=False) as served:
        assert await counted(served, answers=3) == counted_first
