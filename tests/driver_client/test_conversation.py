"""Requests side by side on one line, whoever is at its other end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from decathlon_sandbox import wire

from decathlon_mcp.driver_client.rpc import MAX_NOTES_BYTES, RpcClient
from decathlon_mcp.errors import SandboxLostError

pytestmark = pytest.mark.anyio


@dataclass
class Wire(ByteStream):
    """The server's end of a line whose other end is this test."""

    incoming: MemoryObjectReceiveStream[bytes]
    sent: list[bytes] = field(default_factory=list[bytes])

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self.incoming.receive()

    async def send(self, item: bytes) -> None:
        self.sent.append(item)

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


async def explain(why: str | None) -> SandboxLostError:
    return SandboxLostError(why or "the line ended")


def line(**message: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


async def test_notes_for_a_slow_caller_are_bounded_in_bytes_and_the_oldest_go() -> None:
    send: MemoryObjectSendStream[bytes]
    send, receive = anyio.create_memory_object_stream[bytes]()
    conversation = RpcClient(Wire(receive), explain)
    seen: list[int] = []
    read_on = anyio.Event()
    size = MAX_NOTES_BYTES // 8

    async def listen(note: dict[str, Any]) -> None:
        seen.append(note["number"])
        await read_on.wait()

    async def ask() -> None:
        assert await conversation.request(wire.PING, {}, listeners={wire.MESSAGE: listen}) == {"done": True}
        send.close()

    async with receive, anyio.create_task_group() as tasks:
        tasks.start_soon(conversation.read)
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        for number in range(50):
            params = {"number": number, "text": "x" * size}
            await send.send(line(method=wire.MESSAGE, params={"id": 1, "params": params}))
        await send.send(line(id=1, result={"done": True}))
        await anyio.wait_all_tasks_blocked()
        read_on.set()
    assert seen == [0, *range(43, 50)]
