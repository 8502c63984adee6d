"""Reading requests: bodies within their limits."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest
from starlette.types import Message, Receive

from decathlon_mcp.http import bodies
from decathlon_mcp.http.bodies import (
    NODE_BYTES,
    SMALL_BODY_BYTES,
    BodyDisconnectError,
    BodyReader,
    MemoryBudget,
)
from decathlon_mcp.json_limits import MAX_NODES
from decathlon_mcp.protocol.messages import McpError

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


async def test_a_body_in_parts_is_read_as_one() -> None:
    messages = (body_part(b"[1, ", more=True), body_part(b"", more=True), body_part(b"2, ", more=True))
    async with BodyReader().read(*request_of(*messages, body_part(b"3]"))) as body:
        assert body == b"[1, 2, 3]"


async def test_reading_stops_at_a_disconnect() -> None:
    with pytest.raises(BodyDisconnectError):
        async with BodyReader().read(*request_of(body_part(b"half", more=True), DISCONNECT)):
            pass


async def test_a_body_over_the_limit_is_refused_by_its_announced_length_before_it_is_read() -> None:
    with pytest.raises(McpError, match="limited to 4 MiB") as refusal:
        async with BodyReader().read(*request_of(length=(4 << 20) + 1)):
            pass
    assert refusal.value.status == 413


async def test_a_body_without_a_length_is_refused_where_it_passes_the_limit() -> None:
    reader = BodyReader(4)
    with pytest.raises(McpError, match="limited to") as refusal:
        async with reader.read(
            *request_of(body_part(b"[1,", more=True), body_part(b"2", more=True), body_part(b"]"))
        ):
            pass
    assert refusal.value.status == 413


@pytest.mark.parametrize("body", [b"[" * 200, b"[0," * 50_000, b"{}\0", '["\u2201"]'.encode("utf-16")])
async def test_json_over_the_limits_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(McpError) as refusal:
        async with BodyReader().read(*request_of(body_part(body))):
            pass
    assert refusal.value.status == 400


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


async def test_bodies_are_counted_by_what_they_need_when_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DECODED_IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(bodies, "WAIT_SECONDS", 0.05)
    brackets = b"[" + b"[]," * 2_000 + b"[]]"
    text = b'["' + b"[]," * 2_000 + b'"]'
    assert len(brackets) <= SMALL_BODY_BYTES
    reader = BodyReader()
    many = MAX_NODES * NODE_BYTES // (len(brackets) * 2 // 3 * NODE_BYTES)
    async with AsyncExitStack() as stack:
        for _ in range(many):
            await stack.enter_async_context(reader.read(*request_of(body_part(brackets))))
        with pytest.raises(McpError) as refusal:
            async with reader.read(*request_of(body_part(brackets))):
                pass
        assert refusal.value.status == 503
        assert refusal.value.data["retryAfterSeconds"] == 5
        # Neither a small body waits for them nor one with few values, whatever its strings contain.
        for body in (b"{}", text, text.ljust(100_000)):
            async with reader.read(*request_of(body_part(body))):
                pass
    async with reader.read(*request_of(body_part(brackets))):
        pass


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


async def test_the_memory_budget_is_granted_in_order_of_arrival() -> None:
    budget, order = MemoryBudget(10), list[int]()

    async def take(size_bytes: int) -> None:
        await budget.acquire(size_bytes)
        order.append(size_bytes)

    await budget.acquire(8)
    async with anyio.create_task_group() as tasks:
        for size_bytes in (10, 1):
            tasks.start_soon(take, size_bytes)
            await anyio.wait_all_tasks_blocked()
        assert order == []
        budget.release(8)
        await anyio.wait_all_tasks_blocked()
        assert order == [10]
        budget.release(10)
    assert order == [10, 1]
    assert budget.free_bytes == 9
