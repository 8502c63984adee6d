"""Reading requests: bodies within their limits."""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx2
import pytest
from starlette.types import Message, Receive

from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.http import bodies
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.bodies import (
    SMALL_BODY_BYTES,
    BodyReader,
)
from decathlon_mcp.protocol.messages import OPERATION_KEY, McpError
from tests.cheats import http_attacks as attacks
from tests.driver.peer import until
from tests.episodes.environment import running_registry
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, INITIALIZE, META, MODERN, TASK, tokens_of
from tests.probe.serving import serving, serving_app

pytestmark = pytest.mark.anyio

DISCONNECT: Message = {"type": "http.disconnect"}
LARGE = b" " * (SMALL_BODY_BYTES + 1)


def body_part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def receive_from(*messages: Message) -> Receive:
    unread = iter(messages)

    async def receive() -> Message:
        return next(unread)

    return receive


def request_of(*messages: Message, length: int | None = None) -> tuple[dict[bytes, bytes], Receive]:
    headers = {} if length is None else {b"content-length": str(length).encode()}
    return headers, receive_from(*messages)


async def test_a_body_without_a_length_is_refused_where_it_passes_the_limit() -> None:
    reader = BodyReader(4)
    with pytest.raises(McpError, match="limited to") as refusal:
        async with reader.read(
            *request_of(body_part(b"[1,", more=True), body_part(b"2", more=True), body_part(b"]"))
        ):
            pass
    assert refusal.value.status == 413


async def test_large_bodies_wait_for_each_other_and_small_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "BODIES_IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(bodies, "WAIT_SECONDS", 0.05)
    reader = BodyReader(len(LARGE))
    async with reader.read(*request_of(body_part(LARGE), length=len(LARGE))):
        async with reader.read(*request_of(body_part(b"{}"))) as body:
            assert body == b"{}"
        with pytest.raises(McpError) as refusal:
            async with reader.read(*request_of(body_part(LARGE))):
                pass
        assert refusal.value.status == 503
        assert refusal.value.data["retryAfterSeconds"] == 5
        monkeypatch.setattr(bodies, "WAIT_SECONDS", 10)
        async with anyio.create_task_group() as tasks:

            async def read_another() -> None:
                async with reader.read(*request_of(body_part(LARGE))):
                    pass

            tasks.start_soon(read_another)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    # Nothing of the refused and the cancelled one is reserved for ever.
    async with reader.read(*request_of(body_part(LARGE))):
        pass


async def test_other_tasks_get_a_turn_between_two_large_bodies() -> None:
    reader, events = BodyReader(), list[str]()

    async def read() -> None:
        async with reader.read(*request_of(body_part(b" " * (bodies.LARGE_BODY_BYTES + 1)))):
            events.append("body")

    async def victim() -> None:
        while events.count("body") < 30:
            events.append("turn")
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(read)
        tasks.start_soon(victim)
    assert ("body", "body") not in itertools.pairwise(events)


async def test_large_bodies_with_many_values_do_not_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = b"[" + b"[]," * 20_000 + b"[]]"
    monkeypatch.setattr(bodies, "BODIES_IN_FLIGHT_BYTES", 3 * len(body))
    monkeypatch.setattr(bodies, "DECODED_IN_FLIGHT_BYTES", 1)
    reader = BodyReader(len(body))
    done: list[int] = []

    async def read() -> None:
        async with reader.read(*request_of(body_part(body[:10_000], more=True), body_part(body[10_000:]))):
            await anyio.sleep(0.001)
        done.append(1)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(read)
    assert len(done) == 50


async def test_bodies_of_one_token_leave_room_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODIES_IN_FLIGHT_BYTES", 400_000)
    monkeypatch.setattr(bodies, "WAIT_SECONDS", 0.2)
    running, finish = list[FakeCall](), anyio.Event()

    async def slow(call: FakeCall) -> str:
        running.append(call)
        await finish.wait()
        return "done"

    async def quick(call: FakeCall) -> str:
        return "done"

    provider = FakeProvider(tools={"probe": {"slow": slow, "quick": quick}})
    tokens = tokens_of(tmp_path, ada="player", bob="player")
    async with running_registry(tmp_path, provider) as registry, AsyncExitStack() as stack:
        app = http_app(registry, tokens=tokens, max_body_bytes=100_000)
        served = await stack.enter_async_context(serving_app(app, registry, tmp_path))
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=10))

        async def call(token: str, tool: str, number: int = 0) -> str:
            headers = {**ACCEPT, "MCP-Protocol-Version": MODERN, "Authorization": f"Bearer {token}"}
            params = {
                "name": tool,
                "arguments": {"text": f"{number}".ljust(90_000)},
                "_meta": {**META, OPERATION_KEY: f"{number}"},
            }
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            answer = await http.post(
                served.episode(episodes[token]),
                json=body,
                headers={**headers, "Mcp-Method": "tools/call", "Mcp-Name": tool},
            )
            return answer.text

        owners = {token: Principal(token=token, alone=False) for token in ("ada", "bob")}
        episodes = {token: registry.start(TASK, owner).id for token, owner in owners.items()}
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(call, "ada", "probe__slow", number)
            await until(lambda: len(running) == 3)
            tasks.cancel_scope.cancel()
        # Her clients have left, and her calls go on.
        assert "at_capacity" in await call("ada", "probe__quick", 3)
        assert "done" in await call("bob", "probe__quick")
        finish.set()
        assert "done" in await call("ada", "probe__slow", 2)
        assert "done" in await call("ada", "probe__quick", 3)


async def test_bodies_beyond_a_tokens_share_do_not_keep_those_of_another_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "BODIES_IN_FLIGHT_BYTES", 8 * len(LARGE))
    reader, waits = BodyReader(3 * len(LARGE)), 2_000

    async def read(token: str, size: int) -> None:
        body = LARGE * size
        async with reader.read(*request_of(body_part(body), length=len(body)), token):
            await anyio.sleep(0 if token == "bob" else 60)

    async def processor_seconds() -> float:
        with anyio.fail_after(5):
            await read("bob", 1)
            began = time.process_time()
            for _ in range(100):
                await read("bob", 1)
        return time.process_time() - began

    alone_seconds = await processor_seconds()
    async with anyio.create_task_group() as tasks:
        for _ in range(2 + waits):
            tasks.start_soon(read, "ada", 3)
        tasks.start_soon(read, "bob's agent", 1)
        await anyio.wait_all_tasks_blocked()
        # A quarter is free, less than what hers wait for; and nobody looks at each of these.
        assert await processor_seconds() < 10 * alone_seconds
        tasks.cancel_scope.cancel()


async def test_bodies_at_unknown_addresses_take_no_room_from_those_of_clients(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host") as served, AsyncExitStack() as stack:
        host, _, port = served.url.removeprefix("http://").rpartition(":")
        part = attacks.request("/none", Content_Length=str(4 << 20)) + b" " * 9000
        for _ in range(65):
            stack.enter_context(socket.create_connection((host, int(port)))).sendall(part)
        await anyio.sleep(0.3)  # the server reads them
        async with httpx2.AsyncClient(headers=ACCEPT, timeout=10) as http:
            large = {**INITIALIZE, "filler": "x" * 9000}
            assert "serverInfo" in (await http.post(served.lobby, json=large)).text
            answer = await http.post(f"{served.url}/none", json=large)
            assert "the lobby is /mcp" in answer.json()["error"]["message"]
