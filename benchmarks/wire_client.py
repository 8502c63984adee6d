"""Minimal MCP client over HTTP, for load tests: the SDK's client would use more CPU than the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

PROTOCOL = "2025-11-25"
MAX_LINE_BYTES = 1 << 20
"""Longest line of a chunked body that is not a chunk, and of the headers."""


class WireClient:
    """One session with handshake on one keep-alive connection; one request at a time.

    `reconnects`: a request that the server did not answer because it had closed the idle connection, as many
    do after 5 s, is sent again over a new one.
    """

    def __init__(
        self,
        url: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        reconnects: bool = False,
        protocol: str = PROTOCOL,
    ) -> None:
        self._url = urlsplit(url)
        self._protocol = protocol
        self._reader = reader
        self._writer = writer
        self._reconnects = reconnects
        self._session = ""
        self._last_id = 0
        self.server_info: dict[str, Any] = {}
        """The result of `initialize`."""

    async def initialize(self) -> None:
        client = {"name": "benchmark", "version": "1"}
        self.server_info = await self.request(
            "initialize", {"protocolVersion": self._protocol, "capabilities": {}, "clientInfo": client}
        )
        await self._post({"method": "notifications/initialized"})

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result. Raises RuntimeError for an error."""
        self._last_id += 1
        body = await self._post({"id": self._last_id, "method": method, "params": params})
        data = next((line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")), body)
        reply = json.loads(data)
        if "result" not in reply:
            raise RuntimeError(data.decode())
        return reply["result"]

    async def cancel_last(self) -> None:
        """Cancel the request that was sent last, over another connection. It may then get no reply."""
        async with self.sibling() as other:
            await other._post({"method": "notifications/cancelled", "params": {"requestId": self._last_id}})

    async def end(self) -> None:
        """End the session."""
        head = (
            f"DELETE {self._url.path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
            f"MCP-Protocol-Version: {self._protocol}\r\nMcp-Session-Id: {self._session}\r\n\r\n"
        )
        await self._exchange(head.encode())

    @asynccontextmanager
    async def sibling(self) -> AsyncGenerator[WireClient]:
        """The same session on a connection of its own."""
        url = self._url.geturl()
        client = WireClient(url, *await _connect(url), protocol=self._protocol)
        client._session, client._last_id, client.server_info = (
            self._session,
            self._last_id,
            self.server_info,
        )
        try:
            yield client
        finally:
            await client.close()

    async def _post(self, message: dict[str, Any]) -> bytes:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        session = f"Mcp-Session-Id: {self._session}\r\n" if self._session else ""
        head = (
            f"POST {self._url.path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
            "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
            f"MCP-Protocol-Version: {self._protocol}\r\n{session}Content-Length: {len(body)}\r\n\r\n"
        )
        return await self._exchange(head.encode() + body)

    async def _exchange(self, request: bytes) -> bytes:
        """Send a request; returns the body of its response."""
        try:
            self._writer.write(request)
            return await self._read_body()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if not self._reconnects or getattr(error, "partial", b""):
                raise
        await self.close()
        self._reader, self._writer = await _connect(self._url.geturl())
        self._writer.write(request)
        return await self._read_body()

    async def close(self) -> None:
        """Close the connection. The session goes on."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read_body(self) -> bytes:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)}
        self._session = headers.get("mcp-session-id", self._session)
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.readexactly(int(headers.get("content-length", 0)))
        chunks: list[bytes] = []
        while size := int(await self._reader.readline(), 16):
            chunks.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return b"".join(chunks)


@asynccontextmanager
async def wire_client(
    url: str, *, initialize: bool = True, reconnects: bool = False, protocol: str = PROTOCOL
) -> AsyncGenerator[WireClient]:
    """Connect and initialize a session. At the end its connection is closed, and the session goes on."""
    client = WireClient(url, *await _connect(url), reconnects=reconnects, protocol=protocol)
    try:
        if initialize:
            await client.initialize()
        yield client
    finally:
        await client.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port, limit=MAX_LINE_BYTES)
