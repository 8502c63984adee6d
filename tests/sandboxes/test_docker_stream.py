"""The stream of a container, over a socket that is no engine's."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import anyio
import pytest

from decathlon_mcp.plugins.docker.sandbox import AttachedStream
from decathlon_mcp.sandboxes.streams import LogTail

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("output", [1, 2])
async def test_small_frames_without_end_are_read_slowly(output: int) -> None:
    """Otherwise a first process in the agent's hands takes all of the event loop's time."""
    frames = (struct.pack(">BxxxI", output, 1) + b"x") * 4096
    own, engine = socket.socketpair()
    written, tail = 0, LogTail()

    def flood() -> None:
        nonlocal written
        try:
            while True:
                written += engine.send(frames)
        except OSError:
            return

    thread = threading.Thread(target=flood)
    with engine:
        stream = AttachedStream(own, tail)
        thread.start()
        with anyio.move_on_after(2):
            await stream.receive_each(lambda chunk: 0.0)
        await stream.aclose()
        thread.join()
    assert written < 4 << 20  # of frames of one byte; it was some 25 MiB
    assert (output == 2) == bool(str(tail))


async def test_a_rest_that_the_handler_asks_for_is_not_cut_short_by_frames() -> None:
    """Otherwise frames that cost much would free the driver's messages of their own limit."""
    frames = (struct.pack(">BxxxI", 1, 8) + b"x" * 8) * 4096
    own, engine = socket.socketpair()
    calls, many = 0, 12  # after so many chunks, each is followed by a short rest for its frames
    asked = anyio.Event()

    def flood() -> None:
        with suppress(OSError):
            while True:
                engine.send(frames)

    def handle(chunk: bytes) -> float:
        nonlocal calls
        calls += 1
        if calls >= many:
            asked.set()
        return 3600.0 if calls >= many else 0.0

    thread = threading.Thread(target=flood)
    with engine:
        stream = AttachedStream(own, LogTail())
        thread.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.receive_each, handle)
            await asked.wait()
            await anyio.sleep(1)  # several short rests
            tasks.cancel_scope.cancel()
        await stream.aclose()
        thread.join()
    assert calls == many
