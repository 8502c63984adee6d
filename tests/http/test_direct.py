"""Calls whose responses are written without a task, and those that need one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.http.bodies import SMALL_BODY_BYTES
from decathlon_mcp.http.protocol import LimitedHttpProtocol
from decathlon_mcp.protocol.resumption import FAST_SECONDS
from tests.http.restarting import RawSession
from tests.http.test_fast_path import META, STORES, Tools, at_episode, called, ready_session, serving
from tests.http.test_lost_clients import until
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of the requests for which tasks were started."""
    started: list[str] = []
    run_in_task = LimitedHttpProtocol.run_in_task

    def noted(self: LimitedHttpProtocol, cycle: Any, app: Any) -> None:
        started.append(cycle.scope["method"])
        run_in_task(self, cycle, app)

    monkeypatch.setattr(LimitedHttpProtocol, "run_in_task", noted)
    return started


@pytest.fixture
async def http() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=30) as http:
        yield http


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


@STORES
async def test_calls_that_wait_for_nothing_but_their_reply_need_no_task(
    tmp_path: Path, http: httpx2.AsyncClient, tasks: list[str], store: bool
) -> None:
    async with serving(tmp_path, Tools(), store=store) as served:
        session = await ready_session(http, served)
        at_task = await RawSession.open(http, served.episode(served.episodes.live[-1].id))
        tasks.clear()
        for number, name in enumerate(("params", "fail", "refuse", "odd", "long")):
            for each in (session, at_task):
                response = await http.post(
                    each.url, json=called(f"probe__{name}", id=number), headers=each.headers
                )
                assert response.status_code == 200
        assert not tasks


async def test_calls_without_a_session_need_no_task(
    tmp_path: Path, http: httpx2.AsyncClient, tasks: list[str]
) -> None:
    async with serving(tmp_path, Tools()) as served:
        session = await at_episode(http, served)
        headers = {
            "Accept": session.headers["Accept"],
            "Mcp-Method": "tools/call",
            "Mcp-Name": "probe__params",
            "mcp-protocol-version": "2026-07-28",
        }
        tasks.clear()
        for _ in range(2):
            response = await http.post(session.url, json=called(_meta=META), headers=headers)
            assert response.json()["result"]["resultType"] == "complete"
        assert not tasks


@STORES
async def test_call_that_takes_long_or_is_long_gets_a_task(
    tmp_path: Path, http: httpx2.AsyncClient, tasks: list[str], store: bool
) -> None:
    tools = Tools()
    async with serving(tmp_path, tools, store=store) as served, anyio.create_task_group() as group:
        session = await ready_session(http, served)
        tasks.clear()
        group.start_soon(session.call, "probe__slow")
        await until(lambda: tools.running)
        await anyio.sleep(FAST_SECONDS * 1.5)
        # Without a store, the answer is one JSON body, and nobody watches the client.
        assert len(tasks) == int(store)
        tools.finish.set()
        await anyio.sleep(0.05)
        tasks.clear()
        long = "x" * SMALL_BODY_BYTES
        assert long in await session.call("probe__params", request_id=8, text=long)
        assert tasks == ["POST"]


async def test_requests_in_pieces_and_several_at_once_are_answered_in_their_order(
    tmp_path: Path, http: httpx2.AsyncClient, tasks: list[str]
) -> None:
    async with serving(tmp_path, Tools()) as served:
        session = await ready_session(http, served)
        tasks.clear()
        async with connection(served) as (reader, writer):
            whole = call_in_bytes(session, 10)
            for start in range(0, len(whole), 50):
                writer.write(whole[start : start + 50])
                await writer.drain()
                await anyio.sleep(0.002)
            assert await read_answers(reader, 1) == [10]
            assert not tasks
            writer.write(
                b"".join(call_in_bytes(session, number, text=str(number)) for number in (11, 12, 13))
            )
            assert await read_answers(reader, 3) == [11, 12, 13]
            writer.write(call_in_bytes(session, 14, "Expect: 100-continue"))
            assert await read_answers(reader, 1) == [14]
            writer.write(call_in_bytes(session, 15, "Connection: close"))
            assert await read_answers(reader, 1) == [15]
            assert (await reader.read()).endswith(b"0\r\n\r\n")


async def test_request_whose_body_breaks_off_leaves_nothing(
    tmp_path: Path, http: httpx2.AsyncClient, tasks: list[str]
) -> None:
    async with serving(tmp_path, Tools()) as served:
        session = await ready_session(http, served)
        episode = served.episodes.live[-1]
        tasks.clear()
        async with connection(served) as (_, writer):
            writer.write(call_in_bytes(session, 10)[:-5])
            await writer.drain()
            await anyio.sleep(0.1)
        await session.call("probe__params", request_id=11)
        assert episode.calls == 1
        assert not tasks


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
        assert episode.calls == 1


async def test_calls_are_counted_as_with_tasks(tmp_path: Path, http: httpx2.AsyncClient) -> None:
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

    async with serving(tmp_path / "direct", Tools()) as served:
        direct = await counted(served, answers=3)
    async with serving(tmp_path / "sdk", Tools(), fast_path=False) as served:
        assert await counted(served, answers=3) == direct
