"""A TCP relay between a client and a server, whose connections can be cut or refused."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel
from anyio.abc import SocketAttribute, SocketStream, TaskGroup

from tests.probe.serving import Served

OPERATION = re.compile(rb'"decathlon/operation":\s*"([^"]+)"')


class Relay:
    """Relays connections to a server's port until they are cut.

    `sent` is all that clients have sent. Each new connection takes the first of `statuses`, with which it is
    answered instead, and the first of `reply_limits`, the bytes of replies after which it is closed.
    """

    def __init__(self, port: int, tasks: TaskGroup) -> None:
        self.port = port
        self.connected = anyio.Event()
        self.sent = bytearray()
        self.statuses: list[int] = []
        self.reply_limits: list[int] = []
        self._tasks = tasks
        self._open: set[SocketStream] = set()
        self._listening: anyio.CancelScope | None = None
        self._own_port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._own_port}"

    @property
    def operations(self) -> list[str]:
        """The operation ids of the requests that clients have sent, in order."""
        return [operation.decode() for operation in OPERATION.findall(self.sent)]

    async def listen(self) -> None:
        """Accept connections, after `refuse` at the same port."""
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=self._own_port)
        self._own_port = listener.extra(SocketAttribute.local_port)
        self._listening = anyio.CancelScope()

        async def accept(scope: anyio.CancelScope) -> None:
            with scope:
                async with listener:
                    await listener.serve(self.serve, self._tasks)

        self._tasks.start_soon(accept, self._listening)

    async def refuse(self) -> None:
        """Close all connections, and refuse new ones until `listen`."""
        assert self._listening is not None
        self._listening.cancel()
        await anyio.lowlevel.checkpoint()
        await self.cut()

    async def serve(self, client: SocketStream) -> None:
        if self.statuses:
            async with client:
                self.sent += await client.receive()
                await client.send(b"HTTP/1.1 %d Sorry\r\ncontent-length: 0\r\n\r\n" % self.statuses.pop(0))
            return
        limit = self.reply_limits.pop(0) if self.reply_limits else sys.maxsize
        server = await anyio.connect_tcp("127.0.0.1", self.port)
        self._open |= {client, server}
        self.connected.set()
        async with client, server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._copy, client, server, sys.maxsize, self.sent)
            await self._copy(server, client, limit, bytearray())
            tasks.cancel_scope.cancel()
        self._open -= {client, server}

    async def cut(self) -> None:
        """Close all connections; new ones are accepted, and `connected` is set by the next one."""
        self.connected = anyio.Event()
        for stream in list(self._open):
            await anyio.aclose_forcefully(stream)

    async def _copy(self, source: SocketStream, target: SocketStream, limit: int, seen: bytearray) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in source:
                seen += chunk
                await target.send(chunk[:limit])
                limit -= len(chunk)
                if limit <= 0:
                    return


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


@asynccontextmanager
async def relayed(served: Served) -> AsyncGenerator[tuple[Relay, str]]:
    async with anyio.create_task_group() as tasks:
        relay = Relay(port_of(served), tasks)
        await relay.listen()
        yield relay, relay.url
        tasks.cancel_scope.cancel()
