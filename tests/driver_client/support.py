"""A connection in memory whose driver's end is played by a test."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.types import JsonObject


class MemoryByteStream(ByteStream):
    """One end of a pair; sending never blocks."""

    def __init__(
        self, incoming: MemoryObjectReceiveStream[bytes], outgoing: MemoryObjectSendStream[bytes]
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._incoming.receive()

    async def send(self, item: bytes) -> None:
        await self._outgoing.send(bytes(item))

    async def send_eof(self) -> None:
        await self._outgoing.aclose()

    async def aclose(self) -> None:
        await self._outgoing.aclose()
        await self._incoming.aclose()


def stream_pair() -> tuple[MemoryByteStream, MemoryByteStream]:
    """Two connected byte streams."""
    to_first, from_second = anyio.create_memory_object_stream[bytes](math.inf)
    to_second, from_first = anyio.create_memory_object_stream[bytes](math.inf)
    return MemoryByteStream(from_second, to_second), MemoryByteStream(from_first, to_first)


class Peer:
    """The driver's end of a connection."""

    def __init__(self, stream: MemoryByteStream) -> None:
        self._stream = stream
        self._lines = BufferedByteReceiveStream(stream)

    async def receive(self) -> JsonObject:
        """The client's next message."""
        return json.loads(await self._lines.receive_until(b"\n", 1 << 20))

    async def receive_boot_message(self) -> bytes:
        size = await self._lines.receive_until(b"\n", 100)
        return await self._lines.receive_exactly(int(size))

    async def send(self, **message: Any) -> None:
        await self.send_bytes(line(**message))

    async def send_bytes(self, data: bytes) -> None:
        await self._stream.send(data)

    async def reply(self, request: JsonObject, result: Any) -> None:
        await self.send(id=request["id"], result=result)

    async def end(self) -> None:
        """End the stream that the client reads."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def connection() -> AsyncGenerator[tuple[ByteStream, Peer]]:
    """The client's stream and the peer at its other end."""
    client, driver = stream_pair()
    try:
        yield client, Peer(driver)
    finally:
        await client.aclose()
        await driver.aclose()


def line(**message: Any) -> bytes:
    """A JSON-RPC message as a line."""
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


@dataclass
class ScriptedSandbox:
    """An open sandbox whose first process is a `Peer`; nothing else of it works."""

    stream: ByteStream
    log_tail: str = ""
    cause: str | None = None
    spec: SandboxSpec = field(
        default_factory=lambda: SandboxSpec("scripted", ("true",), PurePosixPath("/episode"), "an-image")
    )
    out_of_memory: bool = False
    image_digest: str | None = None

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    async def cause_of_end(self) -> str | None:
        return self.cause

    async def is_running(self) -> bool:
        return self.cause is None

    async def put(self, folder: PurePosixPath, archive: Path | bytes) -> None:
        raise NotImplementedError

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError
