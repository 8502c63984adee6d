"""Raw HTTP requests at a server, generated from a grammar and mutated, guided by the code that they reach.

    python -m tests.fuzz.http --minutes 30

Every input must leave the server as it was: it answers others, has no connection or request left, logs no
exception, and answers with a well-formed status other than 500. An input that reaches new lines of the server
is kept in `corpus/http`; one that breaks a rule is written to the folder `--failures`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import anyio

from decathlon_mcp.http.protocol import ConnectionLimits
from tests.probe.serving import serving

CORPUS = Path(__file__).parent / "corpus" / "http"
TRACED = re.compile(r"decathlon_mcp/(http|protocol|catalogue)/|uvicorn/protocols/http|mcp/server/\w+\.py")
"""Files whose lines count as coverage."""
MAX_INPUT_BYTES = 200_000
REPLY_SECONDS = 0.05
HEALTH_SECONDS = 20.0
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
LIMITS = ConnectionLimits(
    head_seconds=1, body_seconds=1, idle_seconds=2, stalled_seconds=1, linger_seconds=0.2
)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

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
    *(
        b" HTTP/1.1\r\n",
        b"HTTP/2.0",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"\xff\xfe",
    ),
    *(b"[" * 200, b'{"a":' * 200, b"\\u0000", b"\\ud800", b"1e999", b"-", b"null", b'"', b"\\"),
    *(b"x: y\r\n" * 120, b"a" * 70_000),
)


def any_value(random: Random, depth: int = 0) -> Any:
    """A JSON value with the names that the server knows."""
    kind = random.random()
    if depth > 4 or kind < 0.5:
        return random.choice(SCALARS)
    if kind < 0.6:
        return [any_value(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(KEYS): any_value(random, depth + 1) for _ in range(random.randrange(5))}


def body(random: Random) -> bytes:
    """The body of a request, mostly JSON-RPC."""
    if random.random() < 0.1:
        return random.choice(TOKENS)
    params: Any = any_value(random)
    method = random.choice(RPC_METHODS)
    if method == "tools/call" and random.random() < 0.8:
        params = {"name": random.choice(TOOLS), "arguments": any_value(random), "_meta": any_value(random)}
    if method == "initialize" and random.random() < 0.8:
        info = {"name": "fuzz", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": random.choice((1, 2, "a", *SCALARS)), "method": method}
    if random.random() < 0.2:
        del message[random.choice(("jsonrpc", "id", "method"))]
    if random.random() < 0.9:
        message["params"] = params
    return json.dumps([message] if random.random() < 0.05 else message).encode()


def request(random: Random) -> bytes:
    """One request, valid or nearly so."""
    content = body(random) if random.random() < 0.8 else b""
    lines = [f"{random.choice(METHODS)} {random.choice(PATHS)} HTTP/1.{random.choice('1110')}"]
    lines += [random.choice(HEADERS) for _ in range(random.randrange(5))]
    if random.random() < 0.8:
        lines += ["Host: 127.0.0.1", HEADERS[0], HEADERS[2]]
    if random.random() < 0.5:
        lines.append("Mcp-Session-Id: {session}")
    if content and random.random() < 0.3:
        lines.append("Transfer-Encoding: chunked")
        middle = random.randrange(len(content))
        parts = [part for part in (content[:middle], content[middle:]) if part]
        content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        content += b"0\r\n" + random.choice((b"\r\n", b"\r\n", b"a: b\r\n\r\n", b""))
    elif content:
        lines.append(f"Content-Length: {len(content) + random.choice((0, 0, 0, 0, 1, -1))}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def mutate(random: Random, data: bytes, others: Iterable[bytes]) -> bytes:
    """The input with a few changes at random places."""
    for _ in range(random.choice((1, 1, 2, 4))):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice((0, 1, 4, 40)))
        change = random.randrange(5)
        if change == 0:
            inserted = random.choice(TOKENS)
        elif change == 1:
            inserted = bytes([random.randrange(256)])
        elif change == 2:
            inserted = data[start:end] * random.choice((0, 2, 50))
        elif change == 3:
            inserted = request(random)
        else:
            other = random.choice(tuple(others) or (b"",))
            inserted = other[random.randrange(len(other) + 1) :]
        data = data[:start] + inserted + data[end:]
    return data[:MAX_INPUT_BYTES]


def generate(random: Random, corpus: Iterable[bytes] = ()) -> bytes:
    """The bytes that one connection sends; `{session}` stands for the id of an open session."""
    known = tuple(corpus)
    if known and random.random() < 0.6:
        return mutate(random, random.choice(known), known)
    data = b"".join(request(random) for _ in range(random.choice((1, 1, 1, 2, 12))))
    return mutate(random, data, known) if random.random() < 0.4 else data


def fault_in(answer: bytes) -> str | None:
    """What is wrong with the bytes that the server sent on one connection; None if nothing is."""
    if answer and not STATUS.match(answer):
        return f"not a response: {answer[:60]!r}"
    if b"HTTP/1.1 500 " in answer:
        return "status 500"
    return None


class _Coverage:
    """The lines of the server that have been executed."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._traced: dict[str, bool] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        traced = self._traced.get(name)
        if traced is None:
            traced = self._traced[name] = bool(TRACED.search(name))
        if not traced:
            return None
        self.lines.add((name, frame.f_lineno))
        return self.trace


class _Exceptions(logging.Handler):
    """Collects the log records of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


async def exchange(
    host: str, port: int, data: bytes, random: Random, *, seconds: float = REPLY_SECONDS
) -> bytes:
    """Send an input in one to three pieces, and return what is answered within that time."""
    reader, writer = await asyncio.open_connection(host, port)
    answer = b""
    try:
        pieces = random.choice((1, 1, 2, 3))
        for number in range(pieces):
            writer.write(data[len(data) * number // pieces : len(data) * (number + 1) // pieces])
            await asyncio.sleep(0)
        async with asyncio.timeout(seconds):
            while chunk := await reader.read(1 << 16):
                answer += chunk
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return answer


def _keep(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def _summary(executions: int, coverage: _Coverage, last_new_seconds: float, failed: int) -> str:
    lines = f"{executions} executions, {len(coverage.lines)} lines"
    return f"{lines}, last new line after {last_new_seconds:.0f} s, {failed} faults"


async def fuzz(minutes: float, seed: int, failures: Path) -> int:
    """Run until the time is over. Returns the number of inputs that broke a rule."""
    from tests.cheats.http_attacks import open_session

    random, coverage, exceptions = Random(seed), _Coverage(), _Exceptions()
    logging.getLogger().addHandler(exceptions)
    corpus = [file.read_bytes() for file in sorted(CORPUS.iterdir())]
    pending = list(corpus)
    started = last_new = reported = time.monotonic()
    executions = failed = 0
    with tempfile.TemporaryDirectory() as state:
        async with serving(
            Path(state), provider="host", limits=LIMITS, max_sandboxes=2, idle_seconds=5
        ) as served:
            host, _, port_text = served.url.removeprefix("http://").rpartition(":")
            port = int(port_text)
            session = await open_session(host, port)
            sys.settrace(coverage.trace)
            # Coroutines that exist already have frames without a trace function; requests begin new ones.
            while (now := time.monotonic()) - started < minutes * 60:
                replayed = bool(pending)
                data = pending.pop() if pending else generate(random, corpus)
                before = len(coverage.lines)
                sent = data.replace(b"{session}", session.encode()).replace(b"{long}", b"c" * 1000)
                answer = await exchange(host, port, sent, random)
                executions += 1
                fault = fault_in(answer) or "; ".join(exceptions.messages) or None
                exceptions.messages.clear()
                if executions % 50 == 0:
                    # A DELETE ends the session.
                    session = await open_session(host, port)
                    health = await exchange(host, port, HEALTH, random, seconds=HEALTH_SECONDS)
                    fault = fault or (
                        None if health.startswith(b"HTTP/1.1 200") else "healthz does not answer"
                    )
                name = hashlib.sha256(data).hexdigest()[:16]
                if fault is not None:
                    failed += 1
                    _keep(failures, name, data)
                    print(f"FAULT {name}: {fault[-2000:]}", flush=True)  # noqa: T201
                if len(coverage.lines) > before and not replayed:
                    last_new = now
                    corpus.append(data)
                    if fault is None and len(data) < 4_000:
                        _keep(CORPUS, name, data)
                if now - reported > 15:
                    reported = now
                    summary = _summary(executions, coverage, last_new - started, failed)
                    print(f"{now - started:5.0f} s: {summary}", flush=True)  # noqa: T201
            sys.settrace(None)
    print(_summary(executions, coverage, last_new - started, failed))  # noqa: T201
    return failed


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz.http")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--failures", type=Path, default=Path("build/fuzz-http"))
    options = parser.parse_args()
    arguments = (fuzz, options.minutes, options.seed, options.failures)
    return min(1, anyio.run(*arguments, backend_options={"use_uvloop": True}))


if __name__ == "__main__":
    sys.exit(main())
