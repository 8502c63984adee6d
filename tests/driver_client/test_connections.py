"""Connections over a line whose driver has been taken over: what it may say of them, and what comes of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from decathlon_sandbox import wire

from decathlon_mcp.driver_client.tunnels import Tunnels
from decathlon_mcp.types import JsonObject

pytestmark = pytest.mark.anyio

Said = list[tuple[str, JsonObject]]


def connections() -> tuple[Tunnels, Said]:
    said: Said = []

    async def say(method: str, params: JsonObject) -> None:
        said.append((method, params))

    return Tunnels(say), said


def data(conn: int, count: int) -> JsonObject:
    return {"conn": conn, "data": base64.b64encode(b"x" * count).decode()}


async def everything(stream: ByteStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def test_a_port_that_nobody_forwards_leads_nowhere() -> None:
    ours, said = connections()
    asked: list[int] = []

    async def dial() -> ByteStream:
        asked.append(1)
        raise ConnectionRefusedError

    async with anyio.create_task_group() as tasks:
        ours.serve({1000: dial}, tasks)
        for number, port in enumerate((1001, 0, "1000", None, True), start=1):
            ours.hear(wire.OPENED, {"conn": number, "port": port})
        assert asked == said == []
        ours.hear(wire.OPENED, {"conn": 9, "port": 1000})
    assert asked == [1]
    assert said == [(wire.RESET, {"conn": 9})]


async def test_more_than_a_window_breaks_that_connection_alone() -> None:
    ours, said = connections()
    greedy, other = ours.dialled(), ours.dialled()
    for _ in range(6):
        ours.hear(wire.DATA, data(greedy.number, wire.CHUNK_BYTES))
    ours.hear(wire.DATA, data(other.number, 3))
    assert await other.receive() == b"xxx"
    with pytest.raises(anyio.BrokenResourceError):
        await everything(greedy)
    await anyio.aclose_forcefully(greedy)
    assert said[-1] == (wire.RESET, {"conn": greedy.number})


@pytest.mark.parametrize(
    ("method", "params"),
    [
        (wire.DATA, {"data": "not base64!"}),
        (wire.DATA, {"data": 7}),
        (wire.TAKEN, {"bytes": -1}),
        (wire.TAKEN, {"bytes": "many"}),
    ],
)
async def test_what_is_not_of_the_wires_form_breaks_that_connection_alone(
    method: str, params: JsonObject
) -> None:
    ours, _ = connections()
    one, other = ours.dialled(), ours.dialled()
    ours.hear(method, {"conn": one.number, **params})
    ours.hear(method, {"conn": 77, **params})
    ours.hear(method, {"conn": "no number", **params})
    ours.hear(wire.DATA, data(other.number, 1))
    assert await other.receive() == b"x"
    with pytest.raises(anyio.BrokenResourceError):
        await one.send(b"x")


async def test_no_more_is_sent_than_the_other_end_takes() -> None:
    ours, said = connections()
    connection = ours.dialled()

    def sent() -> int:
        return sum(len(base64.b64decode(params["data"])) for method, params in said if method == wire.DATA)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.send, b"x" * (wire.WINDOW_BYTES + 10))
        await anyio.wait_all_tasks_blocked()
        assert sent() == wire.WINDOW_BYTES
        ours.hear(wire.TAKEN, {"conn": connection.number, "bytes": 10**12})
    assert sent() == wire.WINDOW_BYTES + 10
    json.dumps(said)


async def test_who_waits_is_told_that_the_line_has_ended() -> None:
    ours, _ = connections()
    connection = ours.dialled()
    waits: list[Callable[[], Awaitable[Any]]] = [
        connection.receive,
        lambda: connection.send(b"x" * (wire.WINDOW_BYTES + 1)),
    ]

    async def wait(for_it: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(anyio.BrokenResourceError):
            await for_it()

    async with anyio.create_task_group() as tasks:
        for each in waits:
            tasks.start_soon(wait, each)
        await anyio.wait_all_tasks_blocked()
        ours.end()
