"""Clients that attack the HTTP server without knowing any token, id or episode.

Each is a coroutine `attack(host, port)` that ends when the server has closed the connection or everything was
sent. `ATTACKS` has all of them; `benchmarks` and `tests/http` run them against a real server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import anyio

MIB = 1 << 20
FLOOD_BYTES = 60 * MIB
"""What one connection of a flood sends if it is not closed before."""
REPLY_SECONDS = 60.0
"""How long an attack waits for an answer."""

Attack = Callable[[str, int], Awaitable[None]]


async def send(host: str, port: int, *parts: bytes, repeat: bytes = b"", total: int = FLOOD_BYTES) -> bytes:
    """Send the parts, then `repeat` until `total` bytes or the connection's end. Returns the answer."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    answer = b""
    try:
        with suppress(OSError):
            for part in parts:
                writer.write(part)
                await writer.drain()
            block = repeat * max(1, MIB // len(repeat)) if repeat else b""
            for _ in range(total // len(block) if block else 0):
                writer.write(block)
                await writer.drain()
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REPLY_SECONDS):
                answer = await reader.read(1 << 16)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return answer


def request(path: str, body: bytes = b"", method: str = "POST", **headers: str) -> bytes:
    """One HTTP request as bytes."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Accept: application/json, text/event-stream",
        "Content-Type: application/json",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def rpc(method: str, params: object, number: object = 1) -> bytes:
    """One JSON-RPC request as bytes."""
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()


def initialize(**client_info: Any) -> bytes:
    """The body that opens a session."""
    info = {"name": "attack", "version": "1", **client_info}
    return rpc("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info})


HEAD = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTH_CHUNKED = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def endless(name: str, head: bytes, repeat: bytes) -> Attack:
    """An attack that sends the beginning of a request, and then the same bytes without end."""

    async def attack(host: str, port: int) -> None:
        await send(host, port, head, repeat=repeat)

    attack.__name__ = f"endless_{name}"
    return attack


ENDLESS = (
    endless("header_lines", HEAD, b"a:b\r\n"),
    endless("header_value", HEAD + b"a: ", b"b"),
    endless("header_name", HEAD, b"b"),
    endless("address", b"GET /", b"a"),
    endless("query", b"GET /tasks/random/mcp?", b"a=&"),
    endless("line_breaks", b"", b"\r\n"),
    endless("trailers", CHUNKED + b"0\r\n", b"a:b\r\n"),
    endless("trailer_value", HEALTH_CHUNKED + b"0\r\na: ", b"b"),
    endless("chunk_extension", CHUNKED + b"1;a=", b"b"),
    endless("tiny_chunks", CHUNKED, b"1\r\n[\r\n"),
    endless("chunks_to_another_route", HEALTH_CHUNKED, b"10000\r\n" + b"a" * 0x10000 + b"\r\n"),
    # Their responses are not read.
    endless("pipelined_requests", b"", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"),
    endless("brackets", request("/mcp", Content_Length=str(FLOOD_BYTES)), b"[],"),
)


async def large_bodies_for_other_routes(host: str, port: int) -> None:
    """Bodies of 60 MB with every method, for addresses that read none or do not exist."""
    for method in ("GET", "PUT", "OPTIONS", "DELETE"):
        for path in ("/", "/healthz", "/mcp", "/none"):
            head = request(path, method=method, Content_Length=str(FLOOD_BYTES))
            await send(host, port, head, repeat=b"a")


async def pipelined_behind_a_stream(host: str, port: int) -> None:
    """Requests without end behind a GET stream, which never ends by itself."""
    session = await open_session(host, port)
    stream = request("/mcp", method="GET", Mcp_Session_Id=session, Accept="text/event-stream")
    await send(host, port, stream, repeat=b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")


async def other_protocols(host: str, port: int) -> None:
    """Upgrades and other protocols, each followed by data without end."""
    upgrade = b"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: %b\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    for head in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        upgrade % b"websocket" + key,
        upgrade % b"h2c" + b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
        b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):
        await send(host, port, head, repeat=b"\x81\x7e\xff\xff" + b"a" * 1000)


async def open_session(host: str, port: int, **client_info: Any) -> str:
    """Open a session of the lobby with an `initialize`, and return its id; empty if it was refused."""
    answer = await send(host, port, request("/mcp", initialize(**client_info), Connection="close"))
    for line in answer.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"mcp-session-id":
            return value.strip().decode()
    return ""


def _bodies(size: int) -> Iterable[bytes]:
    """Bodies of `size` bytes that are expensive to decode or to answer."""
    call = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%b,"arguments":%b}}'
    yield b"[" + b"[]," * (size // 3) + b"[]]"
    yield b"[" * size
    yield b'{"a":' * (size // 5)
    yield b"[" * (size // 2) + b"]" * (size // 2)
    yield call % (b'"a"', b"[" + b"[]," * (size // 3 - 200) + b"0]")
    yield call % (b'"a"', b'{"a":' * (size // 7) + b"1" + b"}" * (size // 7))
    yield call % (b'"a"', b'"' + b"\\\\" * (size // 2 - 200) + b'"')
    yield call % (b'"' + b"a" * (size - 200) + b'"', b"{}")
    yield b'{"jsonrpc":"2.0","id":"%b","method":"ping"}' % (b"a" * (size - 200))
    yield b'{"jsonrpc":"2.0","id":1,"method":"%b"}' % (b"a" * (size - 200))
    yield b'{"jsonrpc":"2.0","id":%b,"method":"ping"}' % (b"1" * (size - 200))
    yield rpc("tools/call", {"name": "start_episode", "arguments": {"task": "a" * (size - 200)}})
    yield rpc(
        "tools/call", {"name": "list_tasks", "arguments": {"needs": ",".join(["a"] * (size // 2 - 200))}}
    )
    yield rpc("tools/call", {"name": "list_tasks", "arguments": {"without": "[a" * (size // 2 - 200)}})
    unknown = {f"unknown{number}": 1 for number in range(min(size // 20, 40_000))}
    yield rpc("tools/call", {"name": "list_tasks", "arguments": unknown})
    yield rpc("tools/call", {"name": "list_tasks", "_meta": {"progressToken": "a" * (size - 200)}})


async def expensive_bodies(host: str, port: int) -> None:
    """Bodies of nearly 4 MiB that are expensive to decode or to answer, in a session and without one."""
    session = await open_session(host, port)
    for body in _bodies(4 * MIB - 500):
        for head in ({"Mcp_Session_Id": session}, {"Mcp_Protocol_Version": "2026-07-28"}):
            await send(host, port, request("/mcp", body, Connection="close", **head))


async def forms_of_a_page(host: str, port: int) -> None:
    """Send forms of the largest size to the page: all of each but its last byte, or full of escapes."""
    size = 4 * MIB
    head = b"POST /page/session HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
    head += b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: %d\r\n\r\n" % size

    async def begin() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await send(host, port, head + b"secret=" + b"x" * (size - 8))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(begin())
        for _ in range(8):
            tasks.create_task(send(host, port, head + (b"secret=" + b"%41" * (size // 3))[:size]))


async def long_names(host: str, port: int) -> None:
    """The longest possible names of tasks, episodes and sessions, and as many parameters."""
    name = "a" * (50 << 10)
    parameters = "&".join(f"{number:x}=" for number in range(8_000))
    for path in (f"/tasks/{name}/mcp", f"/episodes/{name}/mcp", f"/tasks/random/mcp?{parameters}"):
        await send(host, port, request(path, initialize(), Connection="close"))
    await send(host, port, request("/mcp", initialize(), Connection="close", Mcp_Session_Id=name))


async def sessions_with_large_names(host: str, port: int) -> None:
    """100 sessions, each opened by an `initialize` of nearly 4 MiB, which a server could keep."""
    for _ in range(100):
        await open_session(host, port, title="a" * (4 * MIB - 500))


async def sessions_with_large_requests(host: str, port: int) -> None:
    """100 sessions, each with a last request of nearly 4 MiB, which a server could keep."""
    body = rpc("ping", {"_meta": {"filler": "a" * (4 * MIB - 500)}})
    for _ in range(100):
        session = await open_session(host, port)
        await send(host, port, request("/mcp", body, Connection="close", Mcp_Session_Id=session))


async def unfinished_requests(host: str, port: int, *, count: int = 200, seconds: float = 90) -> None:
    """Connections whose request is never complete: nothing, a part of the head, a part of the body."""
    beginnings = (b"", b"P", HEAD, b"\r\n", HEAD + b"Content-Length: 100000\r\n\r\n" + b"[" * 60_000, CHUNKED)

    async def hold(beginning: bytes) -> None:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(beginning)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        while await reader.read(1 << 16):
                            pass
            finally:
                writer.close()

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(hold, beginnings[number % len(beginnings)])


async def responses_that_are_never_read(host: str, port: int) -> None:
    """Connections that send requests for large responses and read nothing."""
    session = await open_session(host, port)
    call = request("/mcp", rpc("tools/list", {}), Mcp_Session_Id=session)

    async def hold() -> None:
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(host, port, limit=1)
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # pyright: ignore
            try:
                async with asyncio.timeout(90):
                    while True:
                        writer.write(call)
                        await writer.drain()
                        await anyio.sleep(0.01)
            finally:
                writer.transport.abort()

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(hold)


async def many_connections(host: str, port: int) -> None:
    """Idle connections."""
    await unfinished_requests(host, port, count=2_000, seconds=10)


ATTACKS: tuple[Attack, ...] = (
    *ENDLESS,
    large_bodies_for_other_routes,
    pipelined_behind_a_stream,
    other_protocols,
    expensive_bodies,
    forms_of_a_page,
    long_names,
    sessions_with_large_names,
    sessions_with_large_requests,
    unfinished_requests,
    responses_that_are_never_read,
    many_connections,
)
