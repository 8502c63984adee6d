"""Drivers that survive: another server, a server that never comes, and room for responses."""

from __future__ import annotations

import time

import pytest
from decathlon_sandbox import wire

from tests.driver.peer import (
    DriverPeer,
    WireError,
    driver,
)

pytestmark = pytest.mark.anyio
MIB = 1 << 20


# a server that never comes


async def test_driver_ends_with_all_its_processes_when_no_server_comes(python: str) -> None:
    async with driver(python, survive_seconds=1) as peer:
        await peer.start(peer.scripted_server("daemonic"), peer.scripted_server("stubborn", "stubborn"))
        ended_at = time.monotonic()
        assert await peer.close() == 0
        assert time.monotonic() - ended_at > 0.5  # the lease began before
        assert peer.living() == []


# room for responses


async def begin_large(peer: DriverPeer, tool: str = "hang") -> int:
    """Begin a call whose reply may have 60 MiB. There is room for three of them."""
    return await peer.begin_tool("scripted", tool, max_bytes=60 * MIB, unit="x", times=3)


async def test_request_without_room_for_its_response_waits(python: str) -> None:
    async with driver(python) as peer:
        await peer.start(peer.scripted_server("plain"))
        running = [await begin_large(peer) for _ in range(3)]
        waiting, cancelled = await begin_large(peer, "text"), await begin_large(peer, "die")
        assert await peer.request(wire.PING) == {}
        await peer.cancel(cancelled)
        with pytest.raises(WireError) as error:
            await peer.result(cancelled)
        assert error.value.reason == "cancelled"
        assert waiting not in peer.lines
        await peer.cancel(running[0])
        reply = await peer.result(waiting)
        assert reply["result"]["content"][0]["text"] == "xxx"
        assert await peer.text("scripted", "text", unit="y", times=2) == "yy"
