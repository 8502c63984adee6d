"""`forward` and `dial`: TCP connections on the sandbox's loopback, tunnelled to the server.

And `resolve`, a DNS server by which every host name leads to the loopback itself: together with forwarded
ports, it leads programs to a proxy that ignore the variables for one.

The driver's module `decathlon_sandbox.tunnels`, which is sent with the driver: Python 3.10, standard library.
"""

from __future__ import annotations

import binascii
import errno
import os
import socket
import struct
from collections.abc import Callable

from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Backpressure, Reader, Writer
from decathlon_sandbox.driver_requests import Notify, Request, RequestError, describe_error
from decathlon_sandbox.event_loop import EventLoop, Timer
from decathlon_sandbox.strict_json import JsonObject

LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
MAX_TUNNELS = 256
BACKLOG = 64
REPORTED_BYTES = wire.WINDOW_BYTES // 4
"""How many written bytes are reported while more are queued."""
LINGER_SECONDS = 60.0
"""How long a connection whose both ends have finished is kept for data that the peer does not read."""
DNS_PORT = 53
MAX_QUERY_BYTES = 4096
HEADER_BYTES = 12
MAX_NAME_BYTES = 255
TTL_SECONDS = 60
TYPE_A = 1
CLASS_INTERNET = 1
QUERIES_AT_ONCE = 64
"""Answered before other events of the loop get their turn."""
_OPCODE_AND_ANSWER = 0xF800
_RECURSION_DESIRED = 0x0100
_ANSWER_WITH_RECURSION = 0x8080


class Tunnels:
    """The listeners on forwarded ports, and all tunnels by their number."""

    def __init__(self, loop: EventLoop, notify: Notify, backpressure: Backpressure) -> None:
        self._loop = loop
        self._notify = notify
        self._backpressure = backpressure
        self._listeners: dict[int, list[socket.socket]] = {}
        self._tunnels: dict[int, Tunnel] = {}
        # What cancels a connection that is not established yet, by its number.
        self._dials: dict[int, Callable[[], None]] = {}
        self._last_number = 0
        self._resolver: socket.socket | None = None

    def listen(self, request: Request, params: JsonObject) -> None:
        """Listen on ports, except where this has been done before."""
        for port in params["ports"]:
            if port not in self._listeners:
                self._listeners[port] = self._open_listeners(port)
        request.reply({})

    def resolve(self, request: Request) -> None:
        """Answer DNS queries, unless this is done already. IPv4 only: there are no IPv6 addresses."""
        if self._resolver is None:
            resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                resolver.bind(("127.0.0.1", DNS_PORT))
            except OSError as error:
                resolver.close()
                message = f"port {DNS_PORT} cannot be listened on: {describe_error(error)}"
                raise RequestError(wire.NETWORK, message) from None
            resolver.setblocking(False)
            self._resolver = resolver
            self._loop.add_reader(resolver.fileno(), lambda: _answer_queries(resolver))
        request.reply({})

    def reset_all(self) -> None:
        """Reset every tunnel, because another server process has attached. The listeners stay."""
        for cancel in tuple(self._dials.values()):
            cancel()
        for tunnel in tuple(self._tunnels.values()):
            tunnel.reset()

    def dial(self, request: Request, params: JsonObject) -> None:
        """Open a connection; the response is sent once it is established."""
        port, number = params["port"], params["conn"]
        if self._full:
            raise RequestError(wire.NETWORK, f"there are {MAX_TUNNELS} connections already")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        code = connection.connect_ex(("127.0.0.1", port))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            raise _unanswered(port, code)

        def end() -> None:
            self._loop.remove(connection.fileno())
            del self._dials[number]

        def fail(error: RequestError) -> None:
            end()
            connection.close()
            request.fail(error)

        def on_connected() -> None:
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                fail(_unanswered(port, code))
                return
            end()
            try:
                self._add(connection, number)
            except OSError as error:
                connection.close()
                request.fail(RequestError(wire.NETWORK, f"port {port}: {describe_error(error)}"))
                return
            request.reply({})

        self._dials[number] = lambda: fail(RequestError(wire.CANCELLED, "the dial was cancelled"))
        request.on_cancel = self._dials[number]
        self._loop.add_writer(connection.fileno(), on_connected)

    def on_notification(self, method: str, params: JsonObject) -> None:
        """Handle a notification about a tunnel; ignored if the tunnel is closed."""
        number = params["conn"]
        if method == wire.RESET and number in self._dials:
            self._dials[number]()
            return
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return
        if method == wire.DATA:
            tunnel.write(binascii.a2b_base64(params["data"]))
        elif method == wire.TAKEN:
            tunnel.acknowledge(params["bytes"])
        elif method == wire.FINISHED:
            tunnel.finish_writing()
        else:
            tunnel.close()

    @property
    def _full(self) -> bool:
        return len(self._tunnels) + len(self._dials) >= MAX_TUNNELS

    def _open_listeners(self, port: int) -> list[socket.socket]:
        """Listen on every loopback address that exists. Raises RequestError (NETWORK)."""
        sockets: list[socket.socket] = []
        for family, host in LOOPBACK:
            listening = socket.socket(family, socket.SOCK_STREAM)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((host, port))
                listening.listen(BACKLOG)
            except OSError as error:
                listening.close()
                if error.errno in NO_SUCH_ADDRESS:
                    continue
                for other in sockets:
                    other.close()
                message = f"port {port} cannot be listened on: {describe_error(error)}"
                raise RequestError(wire.NETWORK, message) from None
            sockets.append(listening)
        if not sockets:
            raise RequestError(wire.NETWORK, f"port {port} cannot be listened on: there is no loopback")
        for each in sockets:
            each.setblocking(False)
            self._loop.add_reader(each.fileno(), lambda each=each: self._accept(each, port))
        return sockets

    def _accept(self, listening: socket.socket, port: int) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        if self._full:
            connection.close()
            return
        self._last_number += 1
        self._add(connection, self._last_number)
        self._notify(wire.OPENED, {"conn": self._last_number, "port": port})

    def _add(self, connection: socket.socket, number: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tunnels[number] = Tunnel(
            self._loop,
            connection,
            number,
            self._notify,
            self._backpressure,
            lambda: self._tunnels.pop(number, None),
        )


def _unanswered(port: int, code: int) -> RequestError:
    message = f"nothing answers at port {port} in the sandbox: {os.strerror(code)}"
    return RequestError(wire.NETWORK, message)


class Tunnel:
    """One tunnelled connection. Each direction ends separately and has a window of unacknowledged bytes.

    The "peer" is the process in the sandbox at the other end of the connection.
    """

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        number: int,
        notify: Notify,
        backpressure: Backpressure,
        on_close: Callable[[], object],
    ) -> None:
        # The loop has one callback per descriptor, and each direction needs its own.
        self._write_side = connection.dup()
        self._reader = Reader(loop, connection.detach(), self._on_chunk, self._on_end, backpressure)
        self._writer = Writer(loop, os.dup(self._write_side.fileno()), self._on_written)
        self._loop = loop
        self._number = number
        self._notify = notify
        self._on_close = on_close
        self._window_bytes = wire.WINDOW_BYTES
        self._unreported_bytes = 0
        self._peer_finished = False
        self._server_finished = False
        self._linger: Timer | None = None
        self._closed = False

    def write(self, data: bytes) -> None:
        if not self._server_finished:
            self._writer.send(data)

    def acknowledge(self, count: int) -> None:
        """The server has passed on `count` bytes: enlarge the window."""
        self._window_bytes = min(self._window_bytes + count, wire.WINDOW_BYTES)
        self._reader.limit(self._window_bytes)

    def finish_writing(self) -> None:
        """The server sends no more data: shut down the write side once the queue is empty."""
        self._server_finished = True
        self._end_if_finished()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        self._reader.close()
        self._writer.close()
        self._write_side.close()
        self._on_close()

    def reset(self) -> None:
        """Close the connection and report it."""
        self._notify(wire.RESET, {"conn": self._number})
        self.close()

    def _on_chunk(self, chunk: bytes) -> None:
        self._window_bytes -= len(chunk)
        self._reader.limit(self._window_bytes)
        data = binascii.b2a_base64(chunk, newline=False).decode()
        self._notify(wire.DATA, {"conn": self._number, "data": data})

    def _on_end(self) -> None:
        if self._reader.failed:
            self.reset()
            return
        self._peer_finished = True
        self._notify(wire.FINISHED, {"conn": self._number})
        self._end_if_finished()

    def _on_written(self, count: int) -> None:
        if self._writer.closed:
            self.reset()
            return
        self._unreported_bytes += count
        # Not each write: a peer that reads single bytes would cause a notification for each.
        if self._unreported_bytes >= REPORTED_BYTES or not self._writer.queued_bytes:
            self._notify(wire.TAKEN, {"conn": self._number, "bytes": self._unreported_bytes})
            self._unreported_bytes = 0
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        """Pass the server's end on once all its data is written, and close after both ends."""
        if not self._server_finished or self._closed:
            return
        if self._writer.queued_bytes:
            if self._peer_finished and self._linger is None:
                self._linger = self._loop.call_later(LINGER_SECONDS, self.close)
        elif self._peer_finished:
            self.close()
        else:
            try:
                self._write_side.shutdown(socket.SHUT_WR)
            except OSError:
                pass


def _answer_queries(resolver: socket.socket) -> None:
    for _ in range(QUERIES_AT_ONCE):
        try:
            query, sender = resolver.recvfrom(MAX_QUERY_BYTES)
        except OSError:
            return
        reply = answer(query)
        if reply is not None:
            try:
                resolver.sendto(reply, sender)
            except OSError:
                pass  # the client repeats its query


def answer(query: bytes) -> bytes | None:
    """The reply to a DNS query (RFC 1035, 4.1): 127.0.0.1 for an address. None if it is not a query."""
    if len(query) < HEADER_BYTES:
        return None
    number, flags, questions = struct.unpack("!HHH", query[:6])
    if flags & _OPCODE_AND_ANSWER or questions != 1:
        return None
    end = HEADER_BYTES
    while end < len(query) and query[end]:
        if query[end] > 63 or end - HEADER_BYTES > MAX_NAME_BYTES:
            return None
        end += 1 + query[end]
    if end + 5 > len(query):
        return None
    kind, network = struct.unpack("!HH", query[end + 1 : end + 5])
    question, records = query[HEADER_BYTES : end + 5], b""
    if kind == TYPE_A and network == CLASS_INTERNET:
        # The name points to the question's, at byte 12.
        name = 0xC000 | HEADER_BYTES
        records = struct.pack("!HHHIH4B", name, TYPE_A, CLASS_INTERNET, TTL_SECONDS, 4, 127, 0, 0, 1)
    flags = _ANSWER_WITH_RECURSION | flags & _RECURSION_DESIRED
    return struct.pack("!HHHHHH", number, flags, 1, 1 if records else 0, 0, 0) + question + records
