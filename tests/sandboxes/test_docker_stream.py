"""The stream of a container, over a socket that is no engine's."""

from __future__ import annotations

import socket
import struct
import threading

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
