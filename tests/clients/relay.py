"""A TCP relay between a client and a server, whose connections can be cut."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import SocketStream

from tests.probe.serving import Served


class Relay:
    """Relays connections to a server's port until they are cut."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connected = anyio.Event()
        self._open: set[SocketStream] = set()

    async def serve(self, client: SocketStream) -> None:
        server = await anyio.connect_tcp("127.0.0.1", self.port)
        self._open |= {client, server}
        self.connected.set()
        async with client, server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._copy, client, server)
            await self._copy(server, client)
            tasks.cancel_scope.cancel()
        self._open -= {client, server}

    async def cut(self) -> None:
        """Close all connections; new ones are accepted, and `connected` is set by the next one."""
        self.connected = anyio.Event()
        for stream in list(self._open):
            await anyio.aclose_forcefully(stream)

    async def _copy(self, source: SocketStream, into: SocketStream) -> None:
        try:
            async for chunk in source:
                await into.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


@asynccontextmanager
async def relayed(served: Served) -> AsyncGenerator[tuple[Relay, str]]:
    relay = Relay(port_of(served))
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, relay.serve)
        yield relay, f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()
