"""Drivers that survive: another server, a server that never comes, and room for responses."""

from __future__ import annotations

import time
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
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


# tunnels


async def test_new_server_resets_tunnels_and_keeps_forwarded_ports(tmp_path: Path) -> None:
    owner, opened = f"tests-survival-{uuid.uuid4().hex[:12]}", anyio.Event()
    spec = SandboxSpec("tunnels", BOOT_COMMAND, PurePosixPath("/episode"), survives=True)

    async def echo(stream: Any) -> None:
        async with stream:
            async for chunk in stream:
                opened.set()
                await stream.send(chunk)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, echo)
        target = listener.extra(anyio.abc.SocketAttribute.local_port)

        async def dial() -> Any:
            return await anyio.connect_tcp("127.0.0.1", target)

        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as unused:
            port = unused.extra(anyio.abc.SocketAttribute.local_port)
        async with (
            HostProvider(owner, tmp_path, isolation="none") as provider,
            provider.open(spec) as sandbox,
        ):
            async with connect(sandbox, reconnect=ReconnectPolicy(60, 1)) as client:
                await client.forward({port: dial})
                old = await anyio.connect_tcp("127.0.0.1", port)
                await old.send(b"a")
                assert await old.receive() == b"a"
            await sandbox.reopen()
            async with connect(sandbox, reconnect=ReconnectPolicy(60, 2), reattached=True) as client:
                await client.forward({port: dial})
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await old.receive()
                async with await anyio.connect_tcp("127.0.0.1", port) as new:
                    await new.send(b"b")
                    assert await new.receive() == b"b"
            await old.aclose()
        tasks.cancel_scope.cancel()


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
