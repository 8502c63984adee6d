"""Requests at an HTTP server, generated from a grammar or taken from `corpus/http`, and some of them damaged.

    python -m tests.fuzz.http --minutes 30

Every input must leave the server as it was: it answers others, logs no error, and answers with a well-formed
status other than 500. The corpus has the inputs by which a run that was guided by coverage reached new lines.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import TestCase

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decathlon_mcp.http.protocol import ConnectionLimits
from tests.cheats.http_attacks import open_session
from tests.fuzz import run_for_minutes
from tests.probe.serving import Served, serving

CORPUS = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("corpus/http/*"))]
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
MAX_INPUT_BYTES = 200_000
AT_ONCE = 8
REPLY_SECONDS = 0.05
HEALTH_SECONDS = 20.0
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
LIMITS = ConnectionLimits(
    head_seconds=1, body_seconds=1, idle_seconds=2, stalled_seconds=1, linger_seconds=0.2
)

PATHS = (
    *("/", "/healthz", "/mcp", "/tasks/find-answer/mcp", "/tasks/random/mcp?seed=1", "/tasks/none/mcp"),
    *("/episodes/0/mcp", "/.well-known/decathlon-key", "/tasks/random/mcp?needs=a&without=*&order=x", "*"),
    *("http://127.0.0.1/mcp", "127.0.0.1:1", "/%00%ff/mcp", "/tasks/%2e%2e/mcp?split=%zz", "//mcp", ""),
)
METHODS = (
    *("GET", "POST", "POST", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "PRI", "M-SEARCH", "ж"),
)
HEADERS = (
    *("Accept: application/json, text/event-stream", "Accept: */*", "Content-Type: application/json"),
    *("Content-Type: text/plain", "Mcp-Session-Id: {session}", "Mcp-Session-Id: 0", "Connection: close"),
    *("Connection: Upgrade", "Upgrade: websocket", "Upgrade: h2c", "Expect: 100-continue", "Host: 127.0.0.1"),
    *("Host: evil.example", "Origin: http://evil.example", "Authorization: Bearer x", "Last-Event-ID: 1"),
    *("MCP-Protocol-Version: 2025-11-25", "MCP-Protocol-Version: 2026-07-28", "MCP-Protocol-Version: 1"),
    *("Mcp-Method: tools/call", "Mcp-Name: list_tasks", "Mcp-Name: =?base64?AA==?=", "Content-Length: 5"),
    *("Content-Length: 99999999999999999999", "Content-Length: -1", "Transfer-Encoding: chunked"),
    *("Transfer-Encoding: gzip, chunked", "X: \x01\x7f", "X:", ": x", " folded", "Cookie: {long}"),
)
RPC_METHODS = (
    *("initialize", "ping", "tools/list", "tools/call", "prompts/list", "prompts/get", "logging/setLevel"),
    *("server/discover", "notifications/initialized", "notifications/cancelled", "notifications/progress"),
    *("resources/list", "completion/complete", "subscriptions/listen", "none", ""),
)
TOOLS = (
    *("list_tasks", "list_episodes", "episode_status", "list_tools", "call_tool", "claim_done", "evaluate"),
    *("close_episode", "none", "a" * 300),
)
KEYS = (
    *("name", "arguments", "_meta", "progressToken", "requestId", "protocolVersion", "capabilities"),
    *("clientInfo", "version", "episode", "needs", "without", "split", "search", "seed", "sample", "order"),
    *("level", "progress", "answer", "turns", "prompts", "cursor", "uri"),
    *("io.modelcontextprotocol/protocolVersion", "io.modelcontextprotocol/clientCapabilities"),
    *("io.modelcontextprotocol/logLevel",),
)
SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 10**30, 10**400, "", "a", "2025-11-25", "2026-07-28", "0" * 48, "*"),
    *("[!a", "a,b", "\ud800", "\x00", "ж\u2028", "a" * 500, [], {}, [[]], [None], float("inf"), float("nan")),
    *("debug",),
)
TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b"0\r\n\r\n", b"5\r\n", b"ffffffffffffffff\r\n", b";a=b", b": "),
    *(b" HTTP/1.1\r\n", b"HTTP/2.0", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"[" * 200, b'{"a":' * 200, b"\\u0000", b"\\ud800", b"1e999", b"-", b"null", b'"', b"\\", b"\xff\xfe"),
    *(b"x: y\r\n" * 120, b"a" * 70_000),
)


def some_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


VALUES = st.recursive(
    some_of(SCALARS),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(some_of(KEYS), values, max_size=4),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries({"name": some_of(TOOLS), "arguments": VALUES, "_meta": VALUES})
CLIENT = {"name": "fuzz", "version": "1"}
OPENING = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT}
FIELDS = {
    "jsonrpc": st.just("2.0"),
    "id": some_of((1, 2, "a", *SCALARS)),
    "method": st.just("tools/call") | some_of(RPC_METHODS),
    "params": CALLS | st.just(OPENING) | VALUES,
}
MESSAGES = st.fixed_dictionaries(FIELDS) | st.fixed_dictionaries({}, optional=FIELDS)
BODIES = st.builds(json.dumps, MESSAGES | st.lists(MESSAGES, max_size=2)).map(str.encode) | some_of(TOKENS)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, valid or nearly so; `{session}` stands for the id of an open session."""
    content = draw(st.just(b"") | BODIES)
    lines = [f"{draw(some_of(METHODS))} {draw(some_of(PATHS))} HTTP/1.{draw(some_of('1110'))}"]
    lines += draw(st.lists(some_of(HEADERS), max_size=4))
    lines += draw(some_of(((), *[("Host: 127.0.0.1", HEADERS[0], HEADERS[2])] * 4)))
    lines += draw(some_of(((), ("Mcp-Session-Id: {session}",))))
    framing = draw(some_of(("length", "length", "chunked"))) if content else ""
    if framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
        middle = draw(st.integers(0, len(content)))
        parts = [part for part in (content[:middle], content[middle:]) if part]
        content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        content += b"0\r\n" + draw(some_of((b"\r\n", b"\r\n", b"a: b\r\n\r\n", b"")))
    elif framing:
        lines.append(f"Content-Length: {len(content) + draw(some_of((0, 0, 0, 0, 1, -1)))}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    """The bytes that one connection sends: requests or an input of the corpus, and a few changes."""
    data = draw(st.lists(requests(), min_size=1, max_size=12).map(b"".join) | some_of(CORPUS))
    for _ in range(draw(some_of((0, 1, 2, 4)))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(some_of((0, 1, 4, 40)))
        repeated = some_of((data[start:end] * 2, data[start:end] * 50))
        inserted = draw(some_of(TOKENS) | st.binary(max_size=2) | requests() | some_of(CORPUS) | repeated)
        data = data[:start] + inserted + data[end:]
    return data[:MAX_INPUT_BYTES]


async def exchange(served: Served, pieces: Iterable[bytes], seconds: float = REPLY_SECONDS) -> bytes:
    """Send an input in pieces, and return what is answered within that time."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(seconds):
            while chunk := await reader.read(1 << 16):
                answer += chunk
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return answer


async def check_all(served: Served, batch: Iterable[bytes]) -> None:
    """Send each input on a connection of its own, AT_ONCE together. Raises AssertionError for a fault."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    session = (await open_session(host, int(port))).encode()
    places = anyio.CapacityLimiter(AT_ONCE)

    async def check(data: bytes) -> None:
        sent = data.replace(b"{session}", session).replace(b"{long}", b"c" * 1000)
        middle = len(sent) // 2 if len(data) % 2 else 0
        async with places:
            answer = await exchange(served, (sent[:middle], sent[middle:]))
        assert not answer or re.match(rb"HTTP/1\.1 (\d{3}) ", answer), (data, answer[:60])
        assert b"HTTP/1.1 500 " not in answer, data

    with TestCase().assertNoLogs(level="ERROR"):
        async with anyio.create_task_group() as tasks:
            for data in batch:
                tasks.start_soon(check, data)
        health = await exchange(served, (HEALTH,), HEALTH_SECONDS)
    assert health.startswith(b"HTTP/1.1 200")


def run(count: int, corpus: Sequence[bytes] = ()) -> int:
    """Send the corpus and as many generated inputs to a server; returns how many. Raises AssertionError."""

    async def serve() -> None:
        with tempfile.TemporaryDirectory() as state:
            async with serving(
                Path(state), provider="host", limits=LIMITS, max_sandboxes=2, idle_seconds=2
            ) as served:
                await check_all(served, corpus)
                if count:
                    await anyio.to_thread.run_sync(generate, served)

    def generate(served: Served) -> None:
        @settings(max_examples=count // AT_ONCE, deadline=None, suppress_health_check=SLOW)
        @given(batch=st.lists(inputs(), min_size=AT_ONCE, max_size=AT_ONCE))
        def check(batch: list[bytes]) -> None:
            anyio.from_thread.run(check_all, served, batch)

        check()

    anyio.run(serve, backend_options={"use_uvloop": True})
    return count


if __name__ == "__main__":
    run_for_minutes(run)
