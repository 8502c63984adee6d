"""Streams that pass what arrives to a function."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable

import anyio
import pytest

from decathlon_mcp.background import background_tasks
from decathlon_mcp.plugins.docker.sandbox import AttachedStream
from decathlon_mcp.sandboxes.streams import LogTail, SocketStream

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ends() -> AsyncGenerator[tuple[SocketStream, socket.socket]]:
    ours, peer = socket.socketpair()
    stream = SocketStream(ours)
    with anyio.fail_after(10):
        yield stream, peer
    await stream.aclose()
    peer.close()


def collecting(received: list[bytes]) -> Callable[[bytes], float]:
    def handle(chunk: bytes) -> float:
        received.append(chunk)
        return 0.0

    return handle


async def until(received: list[bytes], data: bytes) -> None:
    while b"".join(received) != data:  # noqa: ASYNC110  (nothing announces it)
        await anyio.sleep(0.001)


async def test_nothing_is_read_while_the_function_asks_for_a_pause(
    ends: tuple[SocketStream, socket.socket],
) -> None:
    stream, peer = ends
    received: list[bytes] = []
    async with background_tasks() as tasks:

        def handle(chunk: bytes) -> float:
            received.append(chunk)
            return 0.2

        tasks.start_soon(stream.receive_each, handle)
        await anyio.wait_all_tasks_blocked()
        for expected in (b"a", b"ab"):
            peer.send(expected[-1:])
            await until(received, expected)
            peer.send(b"?")
            await anyio.sleep(0.02)
            assert b"".join(received) == expected
            await until(received, expected + b"?")
            received[:] = [b"a"]


async def test_only_stdout_of_a_container_is_passed_on(ends: tuple[SocketStream, socket.socket]) -> None:
    connection, peer = ends
    log_tail, received = LogTail(), list[bytes]()
    stream = AttachedStream(connection, log_tail)

    def frame(output: int, data: bytes) -> bytes:
        return bytes([output, 0, 0, 0]) + len(data).to_bytes(4, "big") + data

    whole = frame(1, b"one ") + frame(2, b"a warning") + frame(1, b"two")
    async with background_tasks() as tasks:
        tasks.start_soon(stream.receive_each, collecting(received))
        for part in (whole[:6], whole[6:9], whole[9:22], whole[22:]):
            peer.send(part)
            await anyio.sleep(0.01)
        await until(received, b"one two")
    assert b"" not in received
    assert str(log_tail) == "a warning"
