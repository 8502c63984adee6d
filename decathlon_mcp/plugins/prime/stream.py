"""stdin and stdout of a first process, through a live process of Prime's SDK (`inside.py attach`)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.prime.sdk import Sdk
from decathlon_mcp.sandboxes.streams import LogTail

WRITE_BYTES = 1 << 18
"""Longest input of one request."""
SEND_SECONDS = 12.0
"""For one request. A driver that has not taken a message for 30 s is blamed for it: before that, a stream to
a service that does not answer breaks, and is opened again.
"""
MAX_UNREAD_BYTES = 64 << 20
"""The SDK reads without limit. A stream with more is cut: a sandbox out of control could send anything."""
CLOSE_SECONDS = 5.0


class AttachmentStream(ByteStream):
    """One attachment. It ends with the first process, or when the service cuts the stream.

    What is being sent at a cut still arrives, if the service takes it: wait for `sending` before another
    attachment is opened. `ends_input`: the input of the first process ends with this stream. stderr goes to
    `log_tail`.
    """

    def __init__(self, sdk: Sdk, process: Any, log_tail: LogTail, *, ends_input: bool) -> None:
        self.ended = False
        """Whether everything has been received that this attachment will deliver."""
        self.sending = anyio.Lock()
        self._sdk = sdk
        self._process = process
        self._ends_input = ends_input
        self._closed = False
        self._received = b""
        self._unread_bytes = 0
        # The SDK would attach again five times, and the output of the meantime would be missing without a
        # sign. Here, a stream that was cut ends. Its transport is not closed then, for what is being sent.
        process._reconnect = None
        self._transport, process._transport = process._transport, None
        process.stderr.feed = log_tail.add
        self._queue_output, process.stdout.feed = process.stdout.feed, self._feed

    def _feed(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            raise OverflowError(f"more than {MAX_UNREAD_BYTES} bytes have not been read")
        self._queue_output(data)

    async def receive_line(self) -> bytes:
        """The first line. Raises EndOfStream."""
        line = b""
        while b"\n" not in line:
            line += await self.receive()
        line, _, self._received = line.partition(b"\n")
        return line

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not (self._received or self.ended or self._closed):
            try:
                self._received = await anext(self._process.stdout)
                self._unread_bytes -= len(self._received)
            except Exception:  # noqa: BLE001  (the SDK fails in many ways when a stream is cut)
                self.ended = True
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._received:
            raise anyio.EndOfStream
        data, self._received = self._received[:max_bytes], self._received[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        async with self.sending:
            for start in range(0, len(item), WRITE_BYTES):
                if self._closed:
                    raise anyio.ClosedResourceError
                try:
                    with anyio.fail_after(SEND_SECONDS), self._sdk.errors():
                        await self._process.write_stdin(item[start : start + WRITE_BYTES])
                except (DecathlonError, TimeoutError) as error:
                    raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        if self._ends_input and not self._closed:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                with suppress(DecathlonError), self._sdk.errors():  # it ends with the sandbox
                    await self._process.terminate()

    async def aclose(self) -> None:
        await self.send_eof()
        await self.release()

    async def release(self) -> None:
        """Drop the connection to the service. The process inside goes on until the next attachment."""
        if not self._closed:
            self._closed = True
            self._process._pump_task.cancel()  # ends what waits in `receive`
            if self._transport is not None:
                with CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                    await self._transport.aclose()
