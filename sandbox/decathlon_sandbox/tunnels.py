"""`forward` and `dial`: TCP connections on the sandbox's loopback, tunnelled to the server."""

from __future__ import annotations

import binascii
import collections
import errno
import os
import socket

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError, describe_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.event_loop import EventLoop, Timer
    from decathlon_sandbox.rpc import Params, Request

    Notify = Callable[[str, dict[str, Any]], object]

LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
MAX_TUNNELS = 256
BACKLOG = 64
LINGER_SECONDS = 60.0
"""How long a connection whose both ends have finished is kept for data that the peer does not read."""


class Tunnels:
    """The listeners on forwarded ports, and all tunnels by their number."""

    def __init__(self, loop: EventLoop, notify: Notify) -> None:
        self._loop = loop
        self._notify = notify
        self._listeners: dict[int, socket.socket] = {}
        self._tunnels: dict[int, Tunnel] = {}
        # What cancels a connection that is not established yet, by its number.
        self._dials: dict[int, Callable[[], None]] = {}
        self._last_number = 0

    def listen(self, request: Request, params: Params) -> None:
        for port in params.integers("ports", minimum=1, maximum=65535):
            opened = [self._open_listener(family, host, port) for family, host in LOOPBACK]
            if not any(opened):
                raise RequestError(wire.NETWORK, f"port {port} cannot be listened on: there is no loopback")
        request.reply({})

    def dial(self, request: Request, params: Params) -> None:
        """Open a connection; the response is sent once it is established."""
        port = params.integer("port", minimum=1, maximum=65535)
        number = params.integer("conn", minimum=-(1 << 63), maximum=-1)
        if number in self._tunnels or number in self._dials:
            raise RequestError(wire.BAD_PARAMS, "`conn` must be a new number")
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
                tunnel = self._add(connection, number)
            except OSError as error:
                connection.close()
                request.fail(RequestError(wire.NETWORK, f"port {port}: {describe_error(error)}"))
                return
            request.reply({})
            tunnel.start()

        self._dials[number] = lambda: fail(RequestError(wire.CANCELLED, "the dial was cancelled"))
        request.on_cancel = self._dials[number]
        self._loop.add_writer(connection.fileno(), on_connected)

    def on_notification(self, method: str, params: Params) -> None:
        """Handle a notification about a tunnel; ignored if the tunnel is closed."""
        number = params.integer("conn", minimum=-(1 << 63), maximum=1 << 63)
        if method == wire.RESET and number in self._dials:
            self._dials[number]()
            return
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return
        if method == wire.DATA:
            tunnel.write(binascii.a2b_base64(params.string("data")))
        elif method == wire.TAKEN:
            tunnel.acknowledge(params.integer("bytes", maximum=wire.WINDOW_BYTES))
        elif method == wire.FINISHED:
            tunnel.finish_writing()
        else:
            tunnel.close()

    @property
    def _full(self) -> bool:
        return len(self._tunnels) + len(self._dials) >= MAX_TUNNELS

    def _open_listener(self, family: int, host: str, port: int) -> bool:
        """Listen on a port; return False if the address does not exist."""
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
            message = f"port {port} cannot be listened on: {describe_error(error)}"
            raise RequestError(wire.NETWORK, message) from None
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._loop.add_reader(listener.fileno(), lambda: self._accept(listener, port))
        return True

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if self._full:
            connection.close()
            return
        connection.setblocking(False)
        self._last_number += 1
        tunnel = self._add(connection, self._last_number)
        self._notify(wire.OPENED, {"conn": tunnel.number, "port": port})
        tunnel.start()

    def _add(self, connection: socket.socket, number: int) -> Tunnel:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tunnel = Tunnel(self._loop, connection, number, self._notify, lambda: self._tunnels.pop(number, None))
        self._tunnels[number] = tunnel
        return tunnel


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
        on_close: Callable[[], object],
    ) -> None:
        self.number = number
        self._loop = loop
        self._connection = connection
        # The loop has one callback per descriptor, and each direction needs its own.
        self._write_side = connection.dup()
        self._write_side.setblocking(False)
        self._notify = notify
        self._on_close = on_close
        self._window_bytes = wire.WINDOW_BYTES
        self._queue: collections.deque[memoryview] = collections.deque()
        self._watching_reads = False
        self._watching_writes = False
        self._peer_finished = False
        self._server_finished = False
        self._linger: Timer | None = None
        self._closed = False

    def start(self) -> None:
        self._update_reading()

    def write(self, data: bytes) -> None:
        if self._closed or self._server_finished or not data:
            return
        self._queue.append(memoryview(data))
        self._flush()

    def acknowledge(self, count: int) -> None:
        """The server has passed on `count` bytes: enlarge the window."""
        self._window_bytes = min(self._window_bytes + count, wire.WINDOW_BYTES)
        self._update_reading()

    def finish_writing(self) -> None:
        """The server sends no more data: shut down the write side once the queue is empty."""
        if not (self._closed or self._server_finished):
            self._server_finished = True
            self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        self._loop.remove(self._connection.fileno())
        self._loop.remove(self._write_side.fileno())
        self._connection.close()
        self._write_side.close()
        self._queue.clear()
        self._on_close()

    def _update_reading(self) -> None:
        """Read only while the window is not used up."""
        watch = not self._closed and not self._peer_finished and self._window_bytes > 0
        if watch and not self._watching_reads:
            self._loop.add_reader(self._connection.fileno(), self._on_readable)
        elif self._watching_reads and not watch and not self._closed:
            self._loop.remove(self._connection.fileno())
        self._watching_reads = watch

    def _on_readable(self) -> None:
        try:
            chunk = self._connection.recv(min(self._window_bytes, wire.CHUNK_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._reset()
            return
        if chunk:
            self._window_bytes -= len(chunk)
            data = binascii.b2a_base64(chunk, newline=False).decode()
            self._notify(wire.DATA, {"conn": self.number, "data": data})
        else:
            self._peer_finished = True
            self._notify(wire.FINISHED, {"conn": self.number})
        self._update_reading()
        self._close_if_finished()

    def _flush(self) -> None:
        """Write as much of the queue as the peer accepts, and acknowledge it."""
        written = 0
        try:
            while self._queue:
                count = self._write_side.send(self._queue[0])
                written += count
                if count < len(self._queue[0]):
                    self._queue[0] = self._queue[0][count:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._reset()
            return
        if written:
            self._notify(wire.TAKEN, {"conn": self.number, "bytes": written})
        if self._queue and not self._watching_writes:
            self._loop.add_writer(self._write_side.fileno(), self._flush)
        elif self._watching_writes and not self._queue:
            self._loop.remove(self._write_side.fileno())
        self._watching_writes = bool(self._queue)
        if self._server_finished and not self._queue:
            try:
                self._write_side.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        self._close_if_finished()

    def _close_if_finished(self) -> None:
        if not (self._peer_finished and self._server_finished):
            return
        if not self._queue:
            self.close()
        elif self._linger is None:
            self._linger = self._loop.call_later(LINGER_SECONDS, self.close)

    def _reset(self) -> None:
        self._notify(wire.RESET, {"conn": self.number})
        self.close()
