"""Tunnels whose other end, the driver, is played by a test."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from decathlon_sandbox import wire

from decathlon_mcp.plugins import tunnels as tunnels_module
from decathlon_mcp.plugins.tunnels import Dialer, Tunnels
from decathlon_mcp.types import JsonObject
from tests.driver_client.support import stream_pair

pytestmark = pytest.mark.anyio

PORT = 1000


@dataclass
class Driver:
    """Records the notifications that the client sends."""

    sent: list[tuple[str, JsonObject]] = field(default_factory=list[tuple[str, JsonObject]])

    def notify(self, method: str, params: JsonObject) -> None:
        self.sent.append((method, params))

    def data(self, number: int) -> bytes:
        """All data that was sent for a tunnel."""
        return b"".join(
            base64.b64decode(params["data"])
            for method, params in self.sent
            if method == wire.DATA and params["conn"] == number
        )


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def tunnels(driver: Driver) -> Tunnels:
    return Tunnels(driver.notify, lambda work: None)


def data(number: int, content: bytes) -> JsonObject:
    return {"conn": number, "data": base64.b64encode(content).decode()}


def handle(tunnels: Tunnels, method: str, params: JsonObject) -> None:
    tunnels.handle(method, json.dumps(params).encode())


async def read_all(stream: ByteStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


@asynccontextmanager
async def forwarding(tunnels: Tunnels, dial: Dialer) -> AsyncGenerator[None]:
    """Forward `PORT` to what `dial` opens; on exit every tunnel has ended."""
    async with anyio.create_task_group() as tasks:
        tunnels._start = tasks.start_soon  # pyright: ignore[reportPrivateUsage]
        tunnels.forward({PORT: dial})
        yield


# Data and windows


async def test_single_bytes_take_no_more_memory_than_the_window(
    tunnels: Tunnels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "WINDOW_BYTES", 1 << 14)
    tunnel = tunnels.create()
    message = json.dumps(data(tunnel.number, b"x")).encode()
    tracemalloc.start()
    try:
        for _ in range(wire.WINDOW_BYTES):
            tunnels.handle(wire.DATA, message)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * wire.WINDOW_BYTES
    assert await tunnel.receive(10) == b"x" * 10


async def test_more_than_a_window_breaks_that_tunnel_alone(tunnels: Tunnels, driver: Driver) -> None:
    greedy, other = tunnels.create(), tunnels.create()
    handle(tunnels, wire.DATA, data(greedy.number, b"x" * wire.WINDOW_BYTES))
    handle(tunnels, wire.DATA, data(greedy.number, b"x"))
    handle(tunnels, wire.DATA, data(other.number, b"abc"))
    assert await other.receive() == b"abc"
    with pytest.raises(anyio.BrokenResourceError):
        await read_all(greedy)
    await greedy.aclose()
    assert driver.sent[-1] == (wire.RESET, {"conn": greedy.number})


# Violations of the protocol


@pytest.mark.parametrize(
    ("method", "params"),
    [
        (wire.DATA, {"data": "not base64!"}),
        (wire.DATA, {"data": "é"}),
        (wire.TAKEN, {"bytes": -1}),
        (wire.TAKEN, {"bytes": 1.5}),
    ],
)
async def test_invalid_notification_breaks_that_tunnel_alone(
    tunnels: Tunnels, method: str, params: JsonObject
) -> None:
    tunnel, other = tunnels.create(), tunnels.create()
    handle(tunnels, method, {"conn": tunnel.number, **params})
    handle(tunnels, wire.DATA, data(other.number, b"x"))
    assert await other.receive() == b"x"
    with pytest.raises(anyio.BrokenResourceError):
        await tunnel.send(b"x")
    with pytest.raises(anyio.BrokenResourceError):
        await tunnel.receive()


@pytest.mark.parametrize("number", [77, None, [-1]])
async def test_notification_for_an_unknown_tunnel_is_ignored(
    tunnels: Tunnels, driver: Driver, number: Any
) -> None:
    tunnel = tunnels.create()
    for method in (wire.DATA, wire.TAKEN, wire.FINISHED, wire.RESET):
        handle(tunnels, method, {"conn": number, "data": "eA==", "bytes": 1})
    handle(tunnels, wire.DATA, data(tunnel.number, b"mine"))
    assert await tunnel.receive() == b"mine"
    await tunnel.send(b"x")
    assert driver.data(tunnel.number) == b"x"


# Forwarded ports


class Target:
    """Counts how often forwarded connections dial it, and is not there."""

    dialled = 0

    async def dial(self) -> ByteStream:
        self.dialled += 1
        raise OSError


@pytest.mark.parametrize(("number", "port"), [(1, PORT + 1), (1, [PORT]), (-1, PORT), (0, PORT)])
async def test_connection_to_a_port_that_is_not_forwarded_or_with_a_foreign_number_is_ignored(
    tunnels: Tunnels, driver: Driver, number: int, port: Any
) -> None:
    target = Target()
    async with forwarding(tunnels, target.dial):
        handle(tunnels, wire.OPENED, {"conn": number, "port": port})
        await anyio.wait_all_tasks_blocked()
    assert (target.dialled, driver.sent) == (0, [])


async def test_number_of_tunnels_is_bounded(
    tunnels: Tunnels, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels_module, "MAX_TUNNELS", 2)
    opened: list[ByteStream] = []

    async def dial() -> ByteStream:
        theirs, ours = stream_pair()
        opened.append(ours)
        return theirs

    async with forwarding(tunnels, dial):
        for number in (1, 2, 3):
            handle(tunnels, wire.OPENED, {"conn": number, "port": PORT})
        await anyio.wait_all_tasks_blocked()
        assert len(opened) == 2
        handle(tunnels, wire.RESET, {"conn": 1})
        await anyio.wait_all_tasks_blocked()
        handle(tunnels, wire.OPENED, {"conn": 4, "port": PORT})
        await anyio.wait_all_tasks_blocked()
        assert len(opened) == 3
        for number in (2, 4):
            handle(tunnels, wire.RESET, {"conn": number})
    for stream in opened:
        await stream.aclose()
    assert driver.sent == [(wire.RESET, {"conn": 3})], "the driver keeps a connection that is not refused"


async def test_refusals_are_bounded(
    tunnels: Tunnels, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the server's memory while the driver does not read."""
    monkeypatch.setattr(tunnels_module, "MAX_TUNNELS", 2)

    tunnels.forward({PORT: Target().dial})
    for number in range(1, 1000):
        handle(tunnels, wire.OPENED, {"conn": number, "port": PORT})
    assert len(driver.sent) <= 2 * 256


async def test_openings_are_bounded_although_each_connection_is_reset_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is two short lines of the driver, and a connection to the target."""
    monkeypatch.setattr(tunnels_module, "OPENINGS_PER_SECOND", 0)
    tunnels, target = Tunnels(driver.notify, lambda work: None), Target()
    async with forwarding(tunnels, target.dial):
        for number in range(1, 1000):
            handle(tunnels, wire.OPENED, {"conn": number, "port": PORT})
            handle(tunnels, wire.RESET, {"conn": number})
            await anyio.wait_all_tasks_blocked()
    assert target.dialled <= tunnels_module.MAX_TUNNELS
