"""The connections of sandboxes to the proxy: limits on the bytes, memory and waits of each.

mitmproxy reads whatever comes, keeps it until a message is complete, and writes without looking at what has
been read. So the addon puts a reader of its own between mitmproxy and each connection.

`received_bytes` of a connection is what was read of it and does not belong to an answered request. The size
of a request is subtracted as it was parsed, without what TLS and chunks add: so it is never too low, as long
as a connection carries one request after the other (HTTP/1).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

from decathlon_mcp.plugins.web.exchanges import MEBIBYTE
from decathlon_mcp.plugins.web.sandbox_session import Session

MAX_CONNECTIONS = 64
"""Open connections of one sandbox. Browsers open 32 to a proxy."""
MAX_RESOLVING = 2
"""Host names that one sandbox looks up at once: each takes a thread, for many seconds at worst."""
MAX_BODY_BYTES = 8 * MEBIBYTE
"""Longest body of a request."""
MAX_HEAD_BYTES = 256 << 10
"""Longest head of a request with what came before it, such as a TLS handshake, or of a site's response."""
MAX_RECEIVED_BYTES = 16 * MEBIBYTE
"""What all connections of one sandbox may have sent of requests that are not answered."""
MAX_UNREAD_BYTES = 16 * MEBIBYTE
"""A sandbox that has not read so much of its answers gets no more of them until it has."""
RECYCLED_BYTES = MAX_HEAD_BYTES // 2
"""Connections with so many bytes that belong to no request are closed after a response."""
DRAINED_SECONDS = 0.02
"""Time between two looks at what a sandbox has read. asyncio has no event for several connections."""


@dataclass(slots=True)
class Sandbox:
    """The connections of one sandbox. `request_seconds`: how long one may take to send a request, or none."""

    session: Session
    request_seconds: float
    clients: set[Client] = field(default_factory=set["Client"])
    resolving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RESOLVING))
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    _answers: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def turn(self) -> None:
        """Wait until it is a connection's turn: one goes on for each round of the event loop."""
        async with self._turns:
            await asyncio.sleep(0)

    @asynccontextmanager
    async def room(self) -> AsyncGenerator[None]:
        """One recorded response may be read from the recording, once most earlier responses are written."""
        async with self._answers:
            while sum(each.answer_bytes + each.buffered() for each in self.clients) > MAX_UNREAD_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(DRAINED_SECONDS)
            yield


@dataclass(slots=True, eq=False)
class Client:
    """One connection of a sandbox."""

    sandbox: Sandbox
    buffered: Callable[[], int]
    """Bytes that were written to the connection and are still in memory."""
    received_bytes: int = 0
    """Bytes of the requests that are not answered."""
    answer_bytes: int = 0
    """Size of a recorded response that has not been written yet."""
    body: bytearray | None = None
    """The body of a site's response so far, None if it is not recorded."""
    failure: str = ""
    """Why the last connection to a site failed."""
    transports: WeakSet[asyncio.BaseTransport] = field(default_factory=WeakSet[asyncio.BaseTransport])
    """Transports to the sandbox and to sites."""
    _request_bytes: int = 0
    """Size of the request that is not answered, as far as it has been parsed."""
    _site_unparsed: int = 0
    """Bytes of a site's response that are not parsed yet."""
    _state: Literal["idle", "head", "body", "response"] = "head"
    _since: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def close(self) -> None:
        """Close what mitmproxy has left open."""
        # mitmproxy 12.2.3 cancels the reader of a connection to close it. If that waits for the lock of
        # `ConnectionHandler.server_event` then, it ends without closing: a broken TLS hello does that.
        for transport in tuple(self.transports):
            transport.close()

    def head_complete(self, size: int) -> None:
        """The head of a request has been parsed; it has at least this size."""
        self._state, self._request_bytes = "body", size

    def request_complete(self, body_size: int) -> None:
        """A request has been parsed. Its response comes before the next one."""
        self._request_bytes += body_size
        self._state, self._site_unparsed = "response", 0

    def response_complete(self) -> None:
        """The response is being written, or there will be none."""
        self.received_bytes = max(0, self.received_bytes - self._request_bytes)
        self._request_bytes, self.answer_bytes, self.body = 0, 0, None
        self._state, self._since = "idle", asyncio.get_running_loop().time()

    @property
    def is_worn(self) -> bool:
        """Whether so much belongs to no request that the connection has to end with its next response."""
        return self.received_bytes - self._request_bytes > RECYCLED_BYTES

    def received(self, count: int) -> bool:
        """Count what was read of the sandbox; returns whether the connection may stay open."""
        if self._state == "idle":
            self._state, self._since = "head", asyncio.get_running_loop().time()
        self.received_bytes += count
        unparsed = self.received_bytes - self._request_bytes
        limit = MAX_HEAD_BYTES + (MAX_BODY_BYTES if self._state == "body" else 0)
        total = sum(client.received_bytes for client in self.sandbox.clients)
        return unparsed <= limit and total <= MAX_RECEIVED_BYTES and not self.is_late()

    def is_late(self) -> bool:
        """Whether it has taken too long to send a complete request, or has sent nothing for too long."""
        now = asyncio.get_running_loop().time()
        if self._state == "response" or self.buffered():
            self._since = now
        return now - self._since >= self.sandbox.request_seconds

    def received_from_site(self, count: int) -> bool:
        """Count what was read of a site; returns whether its connection may stay open."""
        self._site_unparsed += count
        return self._site_unparsed <= MAX_HEAD_BYTES

    def collect(self, data: bytes) -> bytes:
        """Keep a part of a site's body, as long as there is room for it; returns it to be passed on."""
        self._site_unparsed = 0
        if self.body is not None:
            limit = self.sandbox.session.max_response_bytes
            total = sum(len(client.body or b"") for client in self.sandbox.clients)
            if len(self.body) + len(data) > limit:
                self.body = None
            elif total + len(data) > 2 * limit:
                self.body = None
                self.sandbox.session.problem = "too many large responses at once"
            else:
                self.body += data
        return data


@dataclass(frozen=True, slots=True)
class LimitedReader:
    """What a sandbox sends on one connection, or a site to it. The stream ends if it breaks a limit."""

    client: Client
    reader: asyncio.StreamReader
    is_site: bool = False

    async def read(self, size: int, /) -> bytes:
        seconds = None if self.is_site else self.client.sandbox.request_seconds
        while True:
            try:
                async with asyncio.timeout(seconds):
                    data = await self.reader.read(size)
                break
            except TimeoutError:
                # The connection itself can have timed out (ETIMEDOUT): it would, at once, for ever.
                if self.is_site or self.reader.exception() is not None:
                    raise
                if self.client.is_late():
                    return b""
        await self.client.sandbox.turn()
        received = self.client.received_from_site if self.is_site else self.client.received
        return data if received(len(data)) else b""
