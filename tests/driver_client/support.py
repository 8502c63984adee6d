"""A connection in memory whose driver's end is played by a test."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import Request

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.streams import SocketStream
from decathlon_mcp.types import JsonObject
from tests.fakes.driver_end import DriverEnd

FIRST_ID = (1 << wire.COUNTER_BITS) + 1
BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError)


def stream_pair() -> tuple[SocketStream, SocketStream]:
    """Two connected byte streams."""
    first, second = socket.socketpair()
    return SocketStream(first), SocketStream(second)


class Peer:
    """The driver's end of a connection. After the driver's source, nothing is read before `start`."""

    def __init__(self, stream: SocketStream, *, boots: bool) -> None:
        self.connection = DriverEnd(self._begin, self._on_message)
        self._stream = stream
        self._boots = boots
        self._started = anyio.Event()
        self._requests: dict[int, Request] = {}
        self._messages = asyncio.Queue[JsonObject]()
        if not boots:
            self.start()

    async def run(self) -> None:
        """Read until the stream ends."""
        reader = BufferedByteReceiveStream(self._stream)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, *BROKEN):
            if self._boots:
                size = await reader.receive_until(b"\n", 100)
                await reader.receive_exactly(int(size))
            await self._started.wait()
            while True:
                self.connection.receive(await reader.receive())
                await self.flush()

    def start(self) -> None:
        """Answer when the server attaches."""
        self._started.set()

    def _begin(self, request: Request) -> None:
        self._requests[request.id] = request
        self._messages.put_nowait({"id": request.id, "method": request.method, "params": request.params})

    def _on_message(self, message: JsonObject) -> None:
        if "id" not in message:
            self._messages.put_nowait(message)

    async def receive(self) -> JsonObject:
        """The client's next message."""
        return await self._messages.get()

    async def send(self, **message: Any) -> None:
        await self.send_payloads(payload(**message))

    async def send_payloads(self, *payloads: bytes) -> None:
        """Send what is no answer, and need not be JSON, at once."""
        for each in payloads:
            self.connection.send(each)
        await self.flush()

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self._stream.send(data)

    async def flush(self) -> None:
        with suppress(*BROKEN):
            while data := self.connection.data_to_send():
                await self._stream.send(data)

    async def reply(self, request: JsonObject, result: Any) -> None:
        self._requests.pop(request["id"]).reply(result)
        await self.flush()

    async def end(self) -> None:
        """End the stream that the client reads."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def replace_stream(self, stream: SocketStream) -> None:
        """Use another stream from now on, for which `run` must be called again."""
        await self._stream.aclose()
        self.connection.stream_lost()
        self._stream = stream
        self._boots = False


@asynccontextmanager
async def connection(*, boots: bool = False) -> AsyncGenerator[tuple[SocketStream, Peer]]:
    """The client's stream and the peer at its other end. `boots`: the driver's source comes first."""
    client, driver = stream_pair()
    peer = Peer(driver, boots=boots)
    async with background_tasks() as tasks:
        tasks.start_soon(peer.run)
        try:
            yield client, peer
        finally:
            await client.aclose()
            await driver.aclose()


def payload(**message: Any) -> bytes:
    """A JSON-RPC message, as the driver writes it."""
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode()


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
    put: Any = None
    get: Any = None
    pause: Any = None

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    async def reopen(self) -> None:
        raise SandboxLostError("the sandbox is gone")

    async def cause_of_end(self) -> str | None:
        return self.cause

    async def is_running(self) -> bool:
        return self.cause is None
