"""Messages on a byte stream: JSON objects, one a line, of bounded length, written whole or not at all."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
from anyio.abc import ByteStream
from pydantic_core import from_json

from decathlon_mcp.errors import LimitExceededError, SandboxLostError
from decathlon_mcp.model import as_json, as_object

SEND_SECONDS = 30.0
"""How long a message may take to be written: a driver that does not read for so long is lost."""


class Line:
    """A byte stream as a stream of messages."""

    def __init__(self, stream: ByteStream, *, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._sending = anyio.Lock(fast_acquire=True)

    async def send(self, message: dict[str, Any]) -> None:
        """Write one message. Cancellation never leaves half of one on the line.

        Raises SandboxLostError when the other end is gone or does not read.
        """
        data = as_json(message) + b"\n"
        if len(data) > self._max_bytes:
            raise LimitExceededError(
                f"a message of {len(data)} bytes does not fit on the line ({self._max_bytes} at most)"
            )
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        async with self._sending:
            with anyio.move_on_after(SEND_SECONDS, shield=True) as scope:
                try:
                    await self._stream.send(data)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    raise SandboxLostError("the sandbox is gone") from None
            if scope.cancelled_caught:
                raise SandboxLostError(f"the sandbox has not read from its line for {SEND_SECONDS:.0f} s")

    async def messages(self) -> AsyncGenerator[tuple[dict[str, Any], int]]:
        """Every message with its bytes, until the stream ends. What is no JSON object is passed over.

        Raises LimitExceededError for a line that is too long.
        """
        begun = bytearray()
        while True:
            try:
                chunk = await self._stream.receive(1 << 16)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
            first, *others = chunk.split(b"\n")
            begun += first
            if len(begun) > self._max_bytes:
                raise LimitExceededError(f"the driver sent a line of more than {self._max_bytes} bytes")
            for following in others:
                if (message := _parse(begun)) is not None:
                    yield message, len(begun)
                begun = bytearray(following)


def _parse(line: bytearray) -> dict[str, Any] | None:
    try:
        message = from_json(line, allow_inf_nan=False)
    except ValueError:
        return None
    return as_object(message)
