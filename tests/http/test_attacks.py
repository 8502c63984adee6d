"""Clients without a token that attack the server: memory, response times, and connections that stay open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.http.protocol import ConnectionLimits, peer_of
from tests.cheats import http_attacks as attacks
from tests.driver.peer import until
from tests.episodes.environment import is_idle
from tests.http.messages import INITIALIZE
from tests.probe.clients import playing
from tests.probe.serving import Served, serving
from tests.survival.servers import SupervisedServer, supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HOST = "127.0.0.1"
MAX_GROWTH_MIB = 150.0
MAX_HEALTH_SECONDS = 3.0
"""On a machine with other work; alone it is below 0.1 s."""
QUICK = [attack for attack in attacks.ATTACKS if "seconds" not in attack.__code__.co_varnames]
"""Those that do not wait for deadlines."""
FAST = ConnectionLimits(
    head_seconds=0.5, body_seconds=0.5, idle_seconds=1, stalled_seconds=0.5, linger_seconds=0.5
)
"""Deadlines of seconds instead of minutes."""
HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
async def server(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[SupervisedServer]:
    state = tmp_path_factory.mktemp("server") / "state"
    async with supervised_server(state, "--no-supervisor", "--survive-seconds", "0") as server:
        yield server


@pytest.mark.parametrize("attack", QUICK, ids=[attack.__name__ for attack in QUICK])
async def test_attack_neither_fills_the_memory_nor_stops_the_server(
    server: SupervisedServer, attack: attacks.Attack
) -> None:
    server.reset_peak()
    before = server.memory_mib()
    async with server.watched() as seconds:
        with anyio.fail_after(60):
            await attack(HOST, server.port)
        answers = len(seconds)
        await until(lambda: len(seconds) > answers)
    assert max(seconds) < MAX_HEALTH_SECONDS
    assert server.memory_mib("VmHWM") - before < MAX_GROWTH_MIB


@asynccontextmanager
async def raw_connection(served: Served) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(served: Served, data: bytes) -> bytes:
    """What the server sends until it closes the connection."""
    async with raw_connection(served) as (reader, writer):
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@pytest.fixture
async def fast(tmp_path: Path, anyio_backend: object) -> AsyncGenerator[Served]:
    """A server with short deadlines."""
    async with serving(tmp_path, provider="host", limits=FAST) as served:
        yield served


async def test_connection_whose_head_stays_incomplete_is_closed(fast: Served) -> None:
    async def send(beginning: bytes) -> None:
        answer = await answer_to(fast, beginning)
        if beginning and HEAD + b"\r\n" not in beginning:
            assert answer.startswith(b"HTTP/1.1 408")

    beginnings = [b"", b"G", b"\r\n", HEAD, HEAD + b"a", HEAD + b"\r\n" + HEAD, HEAD + b"\r\n\r\n"]
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for beginning in beginnings:
                tasks.start_soon(send, beginning)


async def test_connection_whose_body_stays_incomplete_is_closed(fast: Served) -> None:
    framings = (b"Content-Length: 9\r\n\r\n[", b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n0\r\n")
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for path, framing in product((b"/mcp", b"/healthz", b"/none"), framings):
                head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\n" % path
                tasks.start_soon(answer_to, fast, head + framing)


async def test_long_call_and_get_stream_outlive_the_deadlines_of_requests(fast: Served) -> None:
    async with playing(fast, "find-answer", "task") as player:
        assert await player.text("probe__shell", command="sleep 2; echo done") == "done\n"


async def test_connection_that_reads_no_response_is_closed(fast: Served) -> None:
    host, _, port = fast.url.removeprefix("http://").rpartition(":")
    session = await attacks.open_session(host, int(port))
    call = attacks.request("/mcp", attacks.rpc("tools/list", {}), Mcp_Session_Id=session)
    # Closed by the server, the attack ends before its own 60 s.
    started = time.monotonic()
    async with raw_connection(fast) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # pyright: ignore
        with pytest.raises(OSError), anyio.fail_after(60):  # noqa: PT012
            while True:
                writer.write(call)
                await writer.drain()
    assert time.monotonic() - started < 50


async def test_client_that_leaves_behind_pipelined_requests_is_noticed(fast: Served) -> None:
    body = attacks.json.dumps(INITIALIZE).encode()
    async with raw_connection(fast) as (reader, writer):
        writer.write(attacks.request("/tasks/find-answer/mcp", body, Connection="close"))
        # To its end: an episode whose client did not get the reply is over.
        opened = await reader.read()
    session = opened.split(b"mcp-session-id: ")[1].split(b"\r\n")[0].decode()
    (episode,) = fast.episodes.live
    stream = attacks.request("/tasks/find-answer/mcp", method="GET", Mcp_Session_Id=session)
    async with raw_connection(fast) as (reader, writer):
        writer.write(stream)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"\r\n")
        await anyio.sleep(0.2)
        assert not is_idle(episode)
    await until(lambda: is_idle(episode))


async def test_connections_of_one_address_are_limited(tmp_path: Path) -> None:
    limits = ConnectionLimits(per_peer=3)
    async with serving(tmp_path, provider="host", limits=limits) as served:
        async with raw_connection(served), raw_connection(served):
            async with raw_connection(served) as (reader, writer):
                writer.write(HEAD + b"\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                assert (await answer_to(served, b"")).startswith(b"HTTP/1.1 503")
            with anyio.fail_after(20):
                answer = b""
                while not answer.startswith(b"HTTP/1.1 200"):
                    answer = await answer_to(served, HEAD + b"Connection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::ffff:1%eth0", "2001:db8::/64"),
    ],
)
def test_connections_are_counted_by_address_or_network(address: str, peer: str) -> None:
    assert peer_of((address, 1)) == peer


REFUSED: list[tuple[bytes, int]] = [
    (HEAD + b"a:b\r\n" * 200 + b"\r\n", 431),
    (HEAD + b"a: " + b"b" * 100_000 + b"\r\n\r\n", 431),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"\x16\x03\x01", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nz\r\n", 400),
    (attacks.request("/mcp", Content_Length=str(5 << 20)), 413),
    (attacks.request("/mcp", method="PUT", Content_Length=str(5 << 20)), 413),
    (attacks.request("/mcp", b"[" * 1000), 400),
]


async def test_refusal_has_a_status_and_the_connection_is_closed(fast: Served) -> None:
    with anyio.fail_after(60):
        for data, status in REFUSED:
            assert (await answer_to(fast, data)).startswith(b"HTTP/1.1 %d " % status), data[:60]


async def test_requests_that_offer_another_protocol_are_served_as_http(fast: Served) -> None:
    protocol = b"websocket"
    upgrade = b"Connection: Upgrade\r\nUpgrade: %b\r\n" % protocol
    request = HEAD + upgrade + b"\r\n"
    post = attacks.request("/mcp", attacks.initialize(), Connection="Upgrade", Upgrade=protocol.decode())
    with anyio.fail_after(20):
        answer = await answer_to(fast, request + post + HEAD + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 3


async def test_pending_calls_full_of_values_do_not_fill_the_memory(server: SupervisedServer) -> None:
    """300 calls of 60 KiB. Each needs 2 MB as long as it runs, of which the server admits some 60."""
    path = "/tasks/find-answer/mcp"
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
        opened = await client.post(path, content=attacks.initialize())
        client.headers["Mcp-Session-Id"] = session = opened.headers["mcp-session-id"]
        await client.post(path, content=b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        await client.post(path, content=attacks.rpc("tools/list", {}))
        server.reset_peak()
        before = server.memory_mib()
        arguments = b'{"seconds":100,"note":"","filler":[' + b"[]," * 20_000 + b"0]}"
        params = b'{"name":"probe__sleep","arguments":%b}' % arguments
        call = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":%b}'
        async with anyio.create_task_group() as tasks:
            for number in range(300):
                request = attacks.request(path, call % (number + 10, params), Mcp_Session_Id=session)
                tasks.start_soon(attacks.send, HOST, server.port, request)
            for _ in range(100):  # every body arrives before the last of these requests
                await client.post(path, content=attacks.rpc("ping", {}))
            tasks.cancel_scope.cancel()
        await client.delete(path)
    assert server.memory_mib("VmHWM") - before < 300


async def test_long_names_are_not_repeated(fast: Served) -> None:
    host, _, port = fast.url.removeprefix("http://").rpartition(":")
    session = await attacks.open_session(host, int(port))
    name = "n" * 200_000
    calls: list[tuple[str, Any]] = [
        ("tools/call", {"name": name, "arguments": {}}),
        ("tools/call", {"name": "start_episode", "arguments": {"task": name}}),
        ("tools/call", {"name": "list_tasks", "arguments": {"needs": "a," * 100_000}}),
        ("tools/call", {"name": "list_tasks", "arguments": {name: 1}}),
        ("tools/call", {"name": "claim_done", "arguments": {"episode": name}}),
        ("tools/call", {"name": "list_tasks", "_meta": {"progressToken": name}}),
        ("prompts/get", {"name": name}),
    ]
    for method, params in calls:
        body = attacks.rpc(method, params)
        request = attacks.request("/mcp", body, Connection="close", Mcp_Session_Id=session)
        answer = await answer_to(fast, request)
        assert answer, (method, list(params))
        assert len(answer) < 5_000, answer[:200]
