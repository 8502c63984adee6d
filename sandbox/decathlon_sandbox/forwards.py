"""`forward` and `dial`: TCP connections of the sandbox's own loopback, carried over the line."""

from __future__ import annotations

import binascii
import collections
import errno
import os
import socket

from decathlon_sandbox import params as read
from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.request import Request

    Notify = Callable[[str, dict[str, Any]], object]

LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
MOST_CONNECTIONS = 256
BACKLOG = 64


class Forwards:
    """Listens where it was told to, and has every connection by its number."""

    def __init__(self, loop: Loop, notify: Notify) -> None:
        self._loop = loop
        self._notify = notify
        self._listeners: dict[int, socket.socket] = {}
        self._connections: dict[int, Connection] = {}
        self._last = 0

    def listen(self, request: Request, params: dict[str, Any]) -> None:
        for port in read.ports(params, "ports"):
            opened = [self._listener(family, host, port) for family, host in LOOPBACK]
            if not any(opened):
                raise Fault(wire.NETWORK, f"port {port} cannot be listened on: there is no loopback")
        request.answer({})

    def dial(self, request: Request, params: dict[str, Any]) -> None:
        """Answered once the connection is there."""
        port, number = read.port(params, "port"), params.get("conn")
        if type(number) is not int or number >= 0 or number in self._connections:
            raise Fault(wire.BAD_PARAMS, "`conn` must be a negative number, and a new one")
        self._refuse_too_many()
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        stream.setblocking(False)
        stream.connect_ex(("127.0.0.1", port))

        def connected() -> None:
            self._loop.forget(stream.fileno())
            fault = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if fault:
                stream.close()
                request.fail(
                    Fault(wire.NETWORK, f"nothing answers at port {port} inside: {os.strerror(fault)}")
                )
                return
            request.answer({})
            self._keep(stream, number).begin()

        self._loop.writes(stream.fileno(), connected)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """What the server says of a connection; of one that is gone, nothing is heard."""
        connection = self._connections.get(params.get("conn"))  # type: ignore[arg-type]
        if connection is None:
            return
        if method == wire.DATA:
            connection.write(binascii.a2b_base64(read.text(params, "data")))
        elif method == wire.TAKEN:
            connection.taken(read.whole_number(params, "bytes", wire.WINDOW_BYTES))
        elif method == wire.FINISHED:
            connection.finish()
        else:
            connection.close()

    def _listener(self, family: int, host: str, port: int) -> bool:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno in NO_SUCH_ADDRESS:
                return False
            raise Fault(wire.NETWORK, f"port {port} cannot be listened on: {reason(error)}") from None
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._loop.reads(listener.fileno(), lambda: self._accept(listener, port))
        return True

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            stream, _ = listener.accept()
        except OSError:
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            stream.close()
            return
        stream.setblocking(False)
        self._last += 1
        connection = self._keep(stream, self._last)
        self._notify(wire.OPENED, {"conn": connection.number, "port": port})
        connection.begin()

    def _keep(self, stream: socket.socket, number: int) -> Connection:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(
            self._loop, stream, number, self._notify, lambda: self._connections.pop(number, None)
        )
        self._connections[number] = connection
        return connection

    def _refuse_too_many(self) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            raise Fault(wire.NETWORK, f"there are {MOST_CONNECTIONS} connections already")


class Connection:
    """One TCP connection; each way ends by itself, and at most a window of bytes is under way in it."""

    def __init__(
        self,
        loop: Loop,
        stream: socket.socket,
        number: int,
        notify: Notify,
        on_end: Callable[[], object],
    ) -> None:
        self.number = number
        self._loop = loop
        self._stream = stream
        self._out = stream.dup()  # the loop has one action for a descriptor, and both ways need one
        self._out.setblocking(False)
        self._notify = notify
        self._on_end = on_end
        self._window_bytes = wire.WINDOW_BYTES
        self._queue: collections.deque[memoryview] = collections.deque()
        self._reading = False
        self._writing = False
        self._heard_all = False
        """Has the peer inside said all?"""
        self._finishing = False
        """Has the server?"""
        self._closed = False

    def begin(self) -> None:
        self._heed()

    def write(self, data: bytes) -> None:
        if self._closed or self._finishing or not data:
            return
        self._queue.append(memoryview(data))
        self._pump_out()

    def taken(self, count: int) -> None:
        self._window_bytes = min(self._window_bytes + count, wire.WINDOW_BYTES)
        self._heed()

    def finish(self) -> None:
        if not (self._closed or self._finishing):
            self._finishing = True
            self._pump_out()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.forget(self._stream.fileno())
        self._loop.forget(self._out.fileno())
        self._stream.close()
        self._out.close()
        self._queue.clear()
        self._on_end()

    def _heed(self) -> None:
        """Read while the server has room for it."""
        wanted = not self._closed and not self._heard_all and self._window_bytes > 0
        if wanted and not self._reading:
            self._loop.reads(self._stream.fileno(), self._pump_in)
        elif self._reading and not wanted and not self._closed:
            self._loop.forget(self._stream.fileno())
        self._reading = wanted

    def _pump_in(self) -> None:
        try:
            chunk = self._stream.recv(min(self._window_bytes, wire.CHUNK_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._break()
            return
        if chunk:
            self._window_bytes -= len(chunk)
            data = binascii.b2a_base64(chunk, newline=False).decode()
            self._notify(wire.DATA, {"conn": self.number, "data": data})
        else:
            self._heard_all = True
            self._notify(wire.FINISHED, {"conn": self.number})
        self._heed()
        self._end_if_done()

    def _pump_out(self) -> None:
        written = 0
        try:
            while self._queue:
                count = self._out.send(self._queue[0])
                written += count
                if count < len(self._queue[0]):
                    self._queue[0] = self._queue[0][count:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._break()
            return
        if written:
            self._notify(wire.TAKEN, {"conn": self.number, "bytes": written})
        if self._queue and not self._writing:
            self._loop.writes(self._out.fileno(), self._pump_out)
        elif self._writing and not self._queue:
            self._loop.forget(self._out.fileno())
        self._writing = bool(self._queue)
        if self._finishing and not self._queue:
            try:
                self._out.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._heard_all and self._finishing and not self._queue:
            self.close()

    def _break(self) -> None:
        self._notify(wire.RESET, {"conn": self.number})
        self.close()
