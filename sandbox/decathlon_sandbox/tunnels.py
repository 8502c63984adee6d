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
    from decathlon_sandbox.streams import Backpressure

    Notify = Callable[[str, dict[str, Any]], object]

LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
MAX_TUNNELS = 256
BACKLOG = 64
LINGER_SECONDS = 60.0
"""How long a connection whose both ends have finished is kept for data that the peer does not read."""


class Tunnels:
    """The listeners on forwarded ports, and all tunnels by their number.

    Under backpressure, nothing is read and no connection is accepted.
    """

    def __init__(self, loop: EventLoop, notify: Notify, backpressure: Backpressure) -> None:
        self._loop = loop
        self._notify = notify
        self._backpressure = backpressure
        self._listeners: dict[int, list[Listener]] = {}
        self._tunnels: dict[int, Tunnel] = {}
        # What cancels a connection that is not established yet, by its number.
        self._dials: dict[int, Callable[[], None]] = {}
        self._last_number = 0

    def listen(self, request: Request, params: Params) -> None:
        """Listen on ports, except where this has been done before."""
        for port in params.integers("ports", minimum=1, maximum=65535):
            if port not in self._listeners:
                self._listeners[port] = self._open_listeners(port)
        request.reply({})

    def reset_all(self) -> None:
        """Reset every tunnel, because another server process has attached. The listeners stay."""
        for cancel in tuple(self._dials.values()):
            cancel()
        for tunnel in tuple(self._tunnels.values()):
            tunnel.reset()

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

    def _open_listeners(self, port: int) -> list[Listener]:
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
        return [Listener(self._loop, each, port, self._accept, self._backpressure) for each in sockets]

    def _accept(self, connection: socket.socket, port: int) -> None:
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
        tunnel = Tunnel(
            self._loop,
            connection,
            number,
            self._notify,
            self._backpressure,
            lambda: self._tunnels.pop(number, None),
        )
        self._tunnels[number] = tunnel
        return tunnel


def _unanswered(port: int, code: int) -> RequestError:
    message = f"nothing answers at port {port} in the sandbox: {os.strerror(code)}"
    return RequestError(wire.NETWORK, message)


class Listener:
    """Accepts connections to one address of a forwarded port while there is no backpressure."""

    def __init__(
        self,
        loop: EventLoop,
        listening: socket.socket,
        port: int,
        on_connection: Callable[[socket.socket, int], object],
        backpressure: Backpressure,
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._port = port
        self._on_connection = on_connection
        self._backpressure = backpressure
        self._watching = False
        listening.setblocking(False)
        backpressure.add(self)
        self.update()

    def update(self) -> None:
        watch = not self._backpressure.paused
        if watch and not self._watching:
            self._loop.add_reader(self._listening.fileno(), self._accept)
        elif self._watching and not watch:
            self._loop.remove(self._listening.fileno())
        self._watching = watch

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        self._on_connection(connection, self._port)


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
        self.number = number
        self._loop = loop
        self._connection = connection
        # The loop has one callback per descriptor, and each direction needs its own.
        self._write_side = connection.dup()
        self._write_side.setblocking(False)
        self._notify = notify
        self._backpressure = backpressure
        self._on_close = on_close
        self._window_bytes = wire.WINDOW_BYTES
        self._queue: collections.deque[memoryview] = collections.deque()
        self._written_bytes = 0  # not reported yet
        self._watching_reads = False
        self._watching_writes = False
        self._peer_finished = False
        self._server_finished = False
        self._linger: Timer | None = None
        self._closed = False

    def start(self) -> None:
        self._backpressure.add(self)
        self._update_reading()

    def update(self) -> None:
        """The backpressure has changed."""
        self._update_reading()
        self._report_written()

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
        self._backpressure.discard(self)
        if self._linger is not None:
            self._linger.cancel()
        self._loop.remove(self._connection.fileno())
        self._loop.remove(self._write_side.fileno())
        self._connection.close()
        self._write_side.close()
        self._queue.clear()
        self._on_close()

    def reset(self) -> None:
        """Close the connection and report it."""
        self._notify(wire.RESET, {"conn": self.number})
        self.close()

    def _update_reading(self) -> None:
        """Read only while the window is not used up and there is no backpressure."""
        watch = not (self._closed or self._peer_finished or self._backpressure.paused)
        watch = watch and self._window_bytes > 0
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
            self.reset()
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
        """Write as much of the queue as the peer accepts, and report it."""
        try:
            while self._queue:
                count = self._write_side.send(self._queue[0])
                self._written_bytes += count
                if count < len(self._queue[0]):
                    self._queue[0] = self._queue[0][count:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.reset()
            return
        self._report_written()
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

    def _report_written(self) -> None:
        # Not under backpressure: a peer that reads single bytes would cause a notification for each.
        if self._written_bytes and not self._closed and not self._backpressure.paused:
            written_bytes, self._written_bytes = self._written_bytes, 0
            self._notify(wire.TAKEN, {"conn": self.number, "bytes": written_bytes})

    def _close_if_finished(self) -> None:
        if not (self._peer_finished and self._server_finished):
            return
        if not self._queue:
            self.close()
        elif self._linger is None:
            self._linger = self._loop.call_later(LINGER_SECONDS, self.close)
