"""`forward` and `dial`: tunnelled connections on a sandbox's loopback. And the replies of its DNS server."""

from __future__ import annotations

import os
import signal
import socket
import struct
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import BOOT_COMMAND, DriverClient, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.errors import DriverError, SandboxLostError
from decathlon_mcp.plugins import tunnels
from decathlon_mcp.plugins.inside_tunnels import answer
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.driver.peer import DriverPeer, WireError
from tests.ports import free_port

pytestmark = pytest.mark.anyio

MAX_TUNNELS = 256
BIG = bytes(range(256)) * 20_000
"""Many times the size of a window."""


def unique_owner() -> str:
    # A provider kills every process on the machine with its owner and the sandbox's name. With a fixed owner
    # a test killed the driver of another test that ran at the same time.
    return f"tests-driver-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
async def driver(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[DriverClient]:
    """For all tests that do not end it; the one that freezes it is the last."""
    spec = SandboxSpec("forwards", BOOT_COMMAND, PurePosixPath("/episode"))
    async with (
        HostProvider(unique_owner(), tmp_path_factory.mktemp("forwards"), isolation="none") as provider,
        provider.open(spec) as sandbox,
        connect(sandbox) as driver,
    ):
        yield driver


@asynccontextmanager
async def service(handle: Any) -> AsyncGenerator[int]:
    """Run a TCP service on the host's loopback; yield its port."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, handle)
            yield listener.extra(anyio.abc.SocketAttribute.local_port)
            tasks.cancel_scope.cancel()


async def upper_case_service(stream: SocketStream) -> None:
    """Send back what is received, in upper case, until the client finishes."""
    async with stream:
        async for chunk in stream:
            await stream.send(chunk.upper())


def connector(port: int) -> Any:
    async def dial() -> ByteStream:
        return await anyio.connect_tcp("127.0.0.1", port)

    return dial


async def receive_all(stream: ByteStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def test_forwarded_port_reaches_a_service_outside_and_passes_on_its_end(driver: DriverClient) -> None:
    inside = free_port()
    async with service(upper_case_service) as outside:
        await tunnels.forward(driver, {inside: connector(outside)})
        async with await anyio.connect_tcp("127.0.0.1", inside) as client:
            await client.send(b"hello")
            assert await client.receive() == b"HELLO"
            await client.send_eof()
            assert await receive_all(client) == b""


async def test_large_data_flows_in_both_directions_at_once(driver: DriverClient) -> None:
    inside = free_port()
    async with service(upper_case_service) as outside:
        await tunnels.forward(driver, {inside: connector(outside)})
        async with await anyio.connect_tcp("127.0.0.1", inside) as client, anyio.create_task_group() as tasks:

            async def send_all() -> None:
                await client.send(BIG)
                await client.send_eof()

            tasks.start_soon(send_all)
            assert await receive_all(client) == BIG.upper()


async def test_connection_that_is_not_read_does_not_block_others(driver: DriverClient) -> None:
    inside = free_port()
    async with service(upper_case_service) as outside:
        await tunnels.forward(driver, {inside: connector(outside)})
        async with await anyio.connect_tcp("127.0.0.1", inside) as idle, anyio.create_task_group() as tasks:
            tasks.start_soon(idle.send, BIG * 4)
            async with await anyio.connect_tcp("127.0.0.1", inside) as client:
                await client.send(b"and me")
                assert await client.receive() == b"AND ME"
            await driver.ping()
            tasks.cancel_scope.cancel()


async def test_connection_is_closed_if_its_target_does_not_answer(driver: DriverClient) -> None:
    inside = free_port()
    await tunnels.forward(driver, {inside: connector(free_port())})
    async with await anyio.connect_tcp("127.0.0.1", inside) as client:
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await client.receive()
    await driver.ping()


async def test_dial_connects_to_a_service_inside(driver: DriverClient) -> None:
    async with service(upper_case_service) as port:
        async with await tunnels.dial(driver, port) as stream:
            await stream.send(BIG[:1000])
            assert await stream.receive() == BIG[:1000].upper()
            await stream.send_eof()
            assert await receive_all(stream) == b""


async def test_dialling_a_closed_port_is_an_error(driver: DriverClient) -> None:
    with pytest.raises(DriverError, match="nothing answers at port"):
        await tunnels.dial(driver, free_port())


async def test_forwarded_ports_still_work_after_a_freeze(driver: DriverClient) -> None:
    inside = free_port()
    async with service(upper_case_service) as outside:
        await tunnels.forward(driver, {inside: connector(outside)})
        await driver.freeze()
        async with await anyio.connect_tcp("127.0.0.1", inside) as client:
            await client.send(b"still")
            assert await client.receive() == b"STILL"


async def test_connections_break_when_the_driver_is_killed(tmp_path: Path) -> None:
    spec = SandboxSpec("lost", BOOT_COMMAND, PurePosixPath("/episode"))
    async with (
        service(upper_case_service) as port,
        HostProvider(unique_owner(), tmp_path, isolation="none") as provider,
    ):
        async with provider.open(spec) as sandbox, connect(sandbox) as driver:
            async with await tunnels.dial(driver, port) as stream:
                pid = (await driver.run(["sh", "-c", "echo $PPID"], cwd="/", timeout_seconds=10)).stdout
                os.kill(int(pid), signal.SIGKILL)
                with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
                    await stream.receive()
            with pytest.raises(SandboxLostError):
                await driver.ping()


async def test_new_server_resets_tunnels_and_keeps_forwarded_ports(tmp_path: Path) -> None:
    port = free_port()
    spec = SandboxSpec("tunnels", BOOT_COMMAND, PurePosixPath("/episode"), survives=True)

    async with (
        service(upper_case_service) as outside,
        HostProvider(unique_owner(), tmp_path, isolation="none") as provider,
        provider.open(spec) as sandbox,
    ):
        async with connect(sandbox, reconnect=ReconnectPolicy(60, 1)) as client:
            await tunnels.forward(client, {port: connector(outside)})
            old = await anyio.connect_tcp("127.0.0.1", port)
            await old.send(b"a")
            assert await old.receive() == b"A"
        await sandbox.reopen()
        async with connect(sandbox, reconnect=ReconnectPolicy(60, 2), reattached=True) as client:
            await tunnels.forward(client, {port: connector(outside)})
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await old.receive()
            async with await anyio.connect_tcp("127.0.0.1", port) as new:
                await new.send(b"b")
                assert await new.receive() == b"B"
        await old.aclose()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose listener accepts nothing and has no place left: connecting to it goes on for a minute."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def fill(peer: DriverPeer, port: int) -> list[int]:
    """Dial a silent port as often as the driver allows; returns the ids of the requests."""
    dials = [await peer.begin(wire.DIAL, port=port, conn=-number) for number in range(1, MAX_TUNNELS + 1)]
    with pytest.raises(WireError, match="connections already"):
        await peer.request(wire.DIAL, port=port, conn=-1000)
    return dials


@pytest.mark.parametrize("way", ["cancel", "reset"])
async def test_dial_that_is_cancelled_gives_its_place_back(
    peer: DriverPeer, silent_port: int, way: str
) -> None:
    for number, dial in enumerate(await fill(peer, silent_port), 1):
        if way == "cancel":
            await peer.cancel(dial)
        else:
            await peer.send({"method": wire.RESET, "params": {"conn": -number}})
        with pytest.raises(WireError) as error:
            await peer.result(dial)
        assert error.value.reason == "cancelled"
    for dial in await fill(peer, silent_port):
        await peer.cancel(dial)
    async with service(upper_case_service) as port:
        await until_dialled(peer, port, -2000)


async def test_dial_that_is_cancelled_after_it_connected_gives_its_place_back(peer: DriverPeer) -> None:
    async with service(upper_case_service) as port:
        for number in range(-1, -2 * MAX_TUNNELS, -1):
            dial = await peer.begin(wire.DIAL, port=port, conn=number)
            await peer.cancel(dial)
            await peer.send({"method": wire.RESET, "params": {"conn": number}})
        await until_dialled(peer, port, -2000)


async def until_dialled(peer: DriverPeer, port: int, number: int) -> None:
    """Dial as often as the driver allows at once."""
    for offset in range(MAX_TUNNELS):
        await peer.request(wire.DIAL, port=port, conn=number - offset)
    with pytest.raises(WireError, match="connections already"):
        await peer.request(wire.DIAL, port=port, conn=-1000)


# DNS

A, AAAA = 1, 28


def query(name: str, kind: int = A, *, flags: int = 0x0100, questions: int = 1, extra: bytes = b"") -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return (
        struct.pack("!HHHHHH", 0x1234, flags, questions, 0, 0, len(extra) > 0)
        + labels
        + b"\0"
        + struct.pack("!HH", kind, 1)
        + extra
    )


def test_every_name_has_the_address_of_the_loopback() -> None:
    asked = query("www.example.org")
    reply = answer(asked)
    assert reply is not None
    assert struct.unpack("!HHHHHH", reply[:12]) == (0x1234, 0x8180, 1, 1, 0, 0)
    assert reply[12 : len(asked)] == asked[12:]
    assert reply[len(asked) :] == struct.pack("!HHHIH4B", 0xC00C, A, 1, 60, 4, 127, 0, 0, 1)
    # There are no other records.
    reply = answer(query("www.example.org", AAAA))
    assert reply is not None
    assert struct.unpack("!HHHHHH", reply[:12])[:4] == (0x1234, 0x8180, 1, 0)
    assert len(reply) == len(asked)


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        query("a.example", flags=0x8180),
        query("a.example", questions=2),
        query("a.example")[:-3],
        query("a.example")[:12] + b"\xc0\x0c\0\1\0\1",
        query("a.example")[:12] + (b"\x01a" * 2000),
    ],
)
def test_what_is_not_a_query_is_not_answered(datagram: bytes) -> None:
    assert answer(datagram) is None
