"""HTTP connections with limits on everything that a client can send, hold open or leave unread.

httptools, uvicorn's fastest parser, limits neither the head of a request nor the time it takes, and uvicorn
reads ahead while a response is in progress. Only bodies reach the application, which limits them itself
(`bodies.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self, cast

import anyio
import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from decathlon_mcp.events import Events, ResponseOver
from decathlon_mcp.http.bodies import MAX_BODY_BYTES, body_length
from decathlon_mcp.protocol.responses import CONNECTION_KEY, Connection
from decathlon_mcp.sandboxes.machine_limits import max_connections

_log = logging.getLogger("decathlon.edge")

FEED_BYTES = 16 << 10
"""Data is parsed in pieces of this size. The limits are checked between pieces, so they are exact to one."""
SWEEP_SECONDS = 1.0
"""Interval at which the deadlines of all connections are checked."""
MIN_RATE = 64 << 10
"""Bytes per second that a client must send of a body, or read of a response, beyond a fixed time."""
MAX_CONNECTIONS_PER_PEER = 4096
"""Connections from one address: four for each of 1,024 episodes, which may all come from one trainer."""
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
EMPTY_COMMENT = b"3\r\n:\r\n\r\n"
"""A chunk with a comment in a stream of events."""
PROBE_SECONDS = (0.005, 0.05, 0.25)
"""Times between the probes of a client that has sent its last byte: for the answer of its kernel."""
HELD_KEY = "decathlon.held"
"""In the ASGI scope of a request whose response lasts as long as an episode."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits for each connection and for all of them together. Times are in seconds."""

    head_bytes: int = 64 << 10
    """Request line and headers; also the framing of a chunked body with its trailers."""
    head_lines: int = 100
    head_seconds: float = 30
    """From the connection's acceptance, or a further request's first byte, to the head's end."""
    body_seconds: float = 60 + MAX_BODY_BYTES / MIN_RATE
    """For a body, from the end of the head."""
    idle_seconds: float = 75
    """Between two requests."""
    stalled_seconds: float = 60
    """For reading what waits to be sent, beyond the time at `MIN_RATE`."""
    linger_seconds: float = 3
    """How long data is discarded after a refusal, so that the client can read the reason."""
    pipelined: int = 8
    """Requests that wait for the response to an earlier request on the same connection."""
    per_peer: int = MAX_CONNECTIONS_PER_PEER
    """Connections from one address."""

    @property
    def head_fault(self) -> str:
        """Why a head that is over the limits is refused."""
        return f"the head is over {self.head_bytes >> 10} KiB or {self.head_lines} header lines"

    @classmethod
    def for_bodies(cls, max_bytes: int, *, behind_proxy: bool = False) -> Self:
        """The default limits, with time for bodies of up to that size."""
        return cls(
            body_seconds=60 + max_bytes / MIN_RATE,
            # All clients of a proxy have its address. The limit on all connections remains.
            per_peer=sys.maxsize if behind_proxy else MAX_CONNECTIONS_PER_PEER,
        )


class Connections:
    """All connections of a server. Their number is limited by the limit of open files as it is now."""

    def __init__(self, limits: ConnectionLimits, events: Events | None = None) -> None:
        self.limits = limits
        self.events = events or Events()
        self._max_open = max_connections()
        self._open: set[LimitedHttpProtocol] = set()
        self._by_peer: Counter[str] = Counter()

    def protocol(self, **options: Any) -> LimitedHttpProtocol:
        """A protocol for a new connection, with uvicorn's keyword arguments."""
        return LimitedHttpProtocol(self, **options)

    def add(self, connection: LimitedHttpProtocol) -> bool:
        """Count a connection until `remove`. False if there are too many of its peer's, or in all."""
        refused = len(self._open) >= self._max_open or self._by_peer[connection.peer] >= self.limits.per_peer
        self._open.add(connection)
        self.events.open_connections = len(self._open)
        self._by_peer[connection.peer] += 1
        return not refused

    def remove(self, connection: LimitedHttpProtocol) -> None:
        """Stop counting a connection that is closed."""
        self._open.discard(connection)
        self.events.open_connections = len(self._open)
        self._by_peer[connection.peer] -= 1
        if self._by_peer[connection.peer] <= 0:
            del self._by_peer[connection.peer]

    def close_idle(self) -> None:
        """Close the connections between two requests; from now on, the others close after a response."""
        for connection in list(self._open):
            connection.close_after_response()

    @property
    def awaited(self) -> int:
        """How many connections wait for a response or for their first request.

        Responses to GET, and to requests that hold an episode, are not counted: these streams stay open.
        """
        return sum(connection.is_awaited for connection in self._open)

    async def sweep(self) -> None:
        """Close connections that are over a deadline, until cancelled."""
        # One task for all: timers would have to be set and cancelled for every request.
        loop = asyncio.get_running_loop()
        while True:
            await anyio.sleep(SWEEP_SECONDS)
            now = loop.time()
            for connection in list(self._open):
                connection.enforce_deadlines(now)


def peer_of(address: tuple[str, int] | None) -> str:
    """Whom a connection is counted for: an IPv4 address, or the network of an IPv6 address."""
    # One client usually has a whole /64 network of IPv6 addresses.
    host = address[0] if address else ""
    if ":" not in host:
        return host
    ip = ipaddress.IPv6Address(host.partition("%")[0])
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Have the end of the connection end the body: HTTP/1.0 has no chunks, but uvicorn sends them."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_part(message: Any) -> None:
        if message["type"] == "http.response.body":
            # uvicorn compares it with what was announced.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_part


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    """Tell the application that the client of a request is gone."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()


def _plain_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """The length of the body of a request that offers another protocol; None if it is not plain."""
    values = dict(headers)
    return None if b"transfer-encoding" in values else body_length(values)


class ResponseWriter:
    """The transport of one response: its head is written together with what follows in the same turn.

    uvicorn writes head and body one after the other, and uvloop makes a system call of each write, which
    includes the kernel's work for a receiver over loopback.
    """

    sends_events = False
    _head: bytes | None = None
    _flush_soon: asyncio.Handle | None = None
    """Set once the response has begun."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Write now, except for a head, which waits for the body or the loop's next iteration."""
        if self._flush_soon is None:
            self._head, self.sends_events = data, b"text/event-stream" in data
            self._flush_soon = asyncio.get_running_loop().call_soon(self.flush)
        elif self._head is not None:
            head, self._head = self._head, None
            self._flush_soon.cancel()
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write the head that waits, before anything else is written or the connection is closed."""
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection: uvicorn's, with the limits of `ConnectionLimits`. Checked with uvicorn 0.54."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self.peer = ""
        self._refused = False
        self.running: RequestResponseCycle | None = None
        self._is_last = False
        self._connection = Connection()
        self._head_begun = False
        self._in_body = False
        """Whether a body is expected."""
        self._overhead_bytes = 0
        """What has arrived of a head, or of a body's framing beyond half of its content. Line breaks before a
        request are counted too. Chunks of a few bytes cost a callback each."""
        self._unparsed_bytes = 0
        """What is missing of the body of a request that offered another protocol."""
        self._deadline: float | None = None
        self._stalled_deadline: float | None = None
        """Times of the event loop; None where none applies."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = ResponseWriter(transport)  # a new one for each response
        self.peer = peer_of(self.client)
        self._expire_in(self._connections.limits.head_seconds)
        if not self._connections.add(self):
            self._refuse(503, "there are too many connections", linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lose()
        self._connections.remove(self)
        super().connection_lost(exc)
        # uvicorn tells the last request only, which may wait for the response to this request.
        self.pipeline.clear()
        _disconnect(self.running)

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Called at the end of the client's input. Returns whether the connection stays open."""
        probe = None if self._refused or self._in_body else self._probe()
        if probe is None or self._connection.settled is not None:
            return False
        # The client may be gone, or only send no more, as after `shutdown(SHUT_WR)`. The kernel of a client
        # that is gone resets the connection once something arrives.
        self._connection.settled = asyncio.Event()
        self._send_probes(probe, self._connection.settled, list(PROBE_SECONDS))
        return True

    def _probe(self) -> bytes | None:
        """What may be sent now without a change of the response; None if nothing may, or none is awaited."""
        cycle = self.running
        if cycle is None or cycle.response_complete or cycle.scope["http_version"] != "1.1":
            return None
        if not cycle.response_started:
            return PROCESSING
        return EMPTY_COMMENT if cycle.chunked_encoding and self._writer.sends_events else None

    def _send_probes(self, probe: bytes, settled: asyncio.Event, seconds: list[float]) -> None:
        """Send a probe now, and others after each of these times, as long as the response is awaited."""
        if self._connection.is_lost or self.running is None or self.running.response_complete:
            return
        # What was prepared for the response's beginning may not be right any more.
        probe = self._probe() or probe
        self._writer.flush()
        self.transport.write(probe)
        if seconds:
            self.loop.call_later(seconds.pop(0), self._send_probes, probe, settled, seconds)
        else:
            settled.set()

    def data_received(self, data: bytes) -> None:
        if len(data) <= FEED_BYTES:
            self._feed(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), FEED_BYTES):
            self._feed(view[start : start + FEED_BYTES])

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse one piece of data, then check what it added to the head or to a body's framing."""
        parser = self.parser
        if parser is None or self._refused or self.transport.is_closing():
            return
        self._overhead_bytes += len(data)
        while True:
            if self._unparsed_bytes:
                # This belongs to the body of a request that offered another protocol.
                body = bytes(data[: self._unparsed_bytes])
                self._unparsed_bytes -= len(body)
                self.on_body(body)
                if not self._unparsed_bytes:
                    self.on_message_complete()
                data = data[len(body) :]
                if not data:
                    break
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # There is no other protocol here: the request is served as HTTP, and so is what follows.
                data = data[upgrade.args[0] :]
                if data and not self._refused:
                    continue
            except httptools.HttpParserError:
                if not self._refused:
                    self._refuse(400, "this is not a valid HTTP request")
            break
        if self._refused:
            return
        if self._overhead_bytes > self._connections.limits.head_bytes:
            if self._in_body:
                self._refuse(
                    400, "the body consists of too small chunks, or has too long extensions or trailers"
                )
            else:
                self._refuse(431, self._connections.limits.head_fault)
        elif self._deadline is None and self._response_complete and not self._in_body:
            # This was the rest of a body that was not needed for the response.
            self._expire_in(self._connections.limits.idle_seconds)

    # Callbacks of the parser. An exception in one of them would be reported as an invalid request.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, object]", self.scope)[CONNECTION_KEY] = self._connection
        self._head_begun, self._overhead_bytes = True, 0
        if self._deadline is None or self._response_complete:
            self._expire_in(self._connections.limits.head_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer, which the application does not expect in the headers that it was given
        headers = self.headers
        if len(headers) >= self._connections.limits.head_lines:
            self._refuse(431, self._connections.limits.head_fault)
            return
        # As uvicorn's, which costs as much again when it is called for each header.
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_begun, self._in_body, self._overhead_bytes = False, True, 0
        if self._refused:
            return
        if len(self.pipeline) >= self._connections.limits.pipelined:
            self._refuse(400, "too many requests before the response to an earlier one")
            return
        parser = self.parser
        if parser is not None and parser.should_upgrade():
            # The parser leaves everything after the head to the other protocol. Java's client offers HTTP/2
            # with every request.
            length = _plain_length(self.headers)
            if length is None:
                self._refuse(400, "a request that offers another protocol needs a Content-Length")
                return
            self._unparsed_bytes = length
        self._expire_in(self._connections.limits.body_seconds)
        super().on_headers_complete()
        # uvicorn stops to read when a request has to wait, and would not notice that the client disconnects.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes -= len(body) * 3 // 2
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._unparsed_bytes:
            return  # called by the parser, for which the other protocol begins here
        self._in_body, self._overhead_bytes, self._deadline = False, 0, None
        if not self._refused:
            super().on_message_complete()

    # Responses.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._writer.flush()  # of a request before it
        self.running, self._writer = cycle, ResponseWriter(self.transport)
        if self._is_last:
            cycle.keep_alive = False
        cycle.transport = cast("asyncio.Transport", self._writer)
        if cycle.scope["http_version"] == "1.0":
            _send_without_chunks(cycle)
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        self._writer.flush()
        super().shutdown()

    @property
    def _last(self) -> RequestResponseCycle | None:
        """The last request whose head is complete. uvicorn does not annotate that there may be none."""
        return self.cycle

    def close_after_response(self) -> None:
        """Close now if the client has all responses, else after the next one."""
        self._is_last = True
        # A client that has just connected is about to send a request, and would not send it again.
        if self._last is not None:
            self.shutdown()

    @property
    def is_awaited(self) -> bool:
        """Whether the client waits for a response that does not stay open, or has not sent a request yet."""
        running = self.running
        if running is None:
            return not self.transport.is_closing()
        stays_open = running.scope["method"] == "GET" or HELD_KEY in running.scope
        return not running.response_complete and not stays_open

    @property
    def _response_complete(self) -> bool:
        return self._last is not None and self._last.response_complete

    def on_response_complete(self) -> None:
        # Instead of uvicorn's, which starts a timer for each response.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._connection.settled is not None:
            self._writer.close()
        elif self._deadline is None:
            self._expire_in(self._connections.limits.idle_seconds)
        elif self._in_body:
            # The rest of the body is discarded. The client should first notice the response, not an error.
            self._expire_in(self._connections.limits.linger_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        waiting_seconds = self.transport.get_write_buffer_size() / MIN_RATE
        self._stalled_deadline = self.loop.time() + self._connections.limits.stalled_seconds + waiting_seconds

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_deadline = None

    # Refusals and deadlines.

    def _expire_in(self, seconds: float) -> None:
        self._deadline = self.loop.time() + seconds

    def _refuse(self, status: int, message: str, *, linger: bool = True) -> None:
        """Answer with an error unless a response is in progress, and close the connection."""
        self._refused = True
        self.headers = []
        if self.transport.is_closing():
            return
        if self.running is not None and not self.running.response_complete:
            if self.running is not self.cycle or self.running.response_started:
                self.transport.abort()
                return
            _disconnect(self.running)
        self._writer.flush()
        self._connections.events.emit(ResponseOver(status))
        text = message.encode("ascii")
        self.transport.write(
            STATUS_LINE[status] + b"content-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
        )
        if linger:
            # Closed with data unread, the connection would be reset and the client would lose the response.
            self.transport.write_eof()
            self._expire_in(self._connections.limits.linger_seconds)
        else:
            self.transport.close()

    def enforce_deadlines(self, now: float) -> None:
        """Close the connection if it is over a deadline."""
        if self.transport.is_closing() and self._stalled_deadline is None:
            # Closing waits until the client has read what was sent.
            self._stalled_deadline = now + self._connections.limits.stalled_seconds
        if self._stalled_deadline is not None and now > self._stalled_deadline:
            self.transport.abort()
            return
        if self._deadline is None or now <= self._deadline or self.transport.is_closing():
            return
        if self._refused:
            self.transport.abort()
        elif self._last is None or (self._response_complete and self._head_begun):
            self._refuse(408, "the request was not complete in time")
        elif self._response_complete:
            self.transport.close()
        elif self._in_body:
            self.transport.abort()
