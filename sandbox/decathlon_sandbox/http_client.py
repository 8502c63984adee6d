"""Blocking HTTP client for threads, with requests that another thread can abort, and an SSE parser.

Every request has its own connection: if a reused connection turned out to be stale, a request that was lost
could not be told from one that was processed.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import urllib.parse

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError
from decathlon_sandbox.streams import LineSplitter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

CONNECT_SECONDS = 10.0
MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 16
HTTP_ERRORS = (OSError, http.client.HTTPException, ValueError)


class HttpExchange:
    """One request and its response. Closes its connection at the end of the context."""

    def __init__(self, url: str, timeout_seconds: float | None) -> None:
        parts = urllib.parse.urlsplit(url)
        connection_types = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in connection_types or not parts.hostname:
            raise ValueError(f"invalid URL: {parts.scheme}://{parts.netloc}")
        self._target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        create = connection_types[parts.scheme]
        self._connection = create(parts.hostname, parts.port, timeout=CONNECT_SECONDS)
        self._timeout_seconds = timeout_seconds
        self._socket: socket.socket | None = None
        self._aborted = False
        self.response: http.client.HTTPResponse

    def __enter__(self) -> HttpExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, method: str, headers: Mapping[str, str], body: bytes | None) -> None:
        """Send the request and wait for the response's headers. Raises OSError, HTTPException."""
        self._connection.connect()
        self._socket = self._connection.sock
        if self._socket is not None:
            self._socket.settimeout(self._timeout_seconds)
        if self._aborted:
            raise ConnectionAbortedError("aborted")
        self._connection.request(method, self._target, body, dict(headers))
        self.response = self._connection.getresponse()

    def chunks(self) -> Iterator[bytes]:
        while chunk := self.response.read1(CHUNK_BYTES):
            yield chunk

    def body(self, limit_bytes: int) -> bytes | None:
        """Return the whole body, or None if it is longer than the limit.

        Raises ConnectionResetError if the connection ends before the body is complete.
        """
        data = bytearray()
        for chunk in self.chunks():
            data += chunk
            if len(data) > limit_bytes:
                return None
        # `read1` does not raise IncompleteRead.
        content_length = self.header("content-length")
        if content_length.isdigit() and len(data) < int(content_length):
            raise ConnectionResetError("the response is incomplete")
        return bytes(data)

    def header(self, name: str) -> str:
        return self.response.headers.get(name, "")

    def abort(self) -> None:
        """End the exchange from another thread."""
        self._aborted = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class HttpClient:
    """Sends requests to one URL, each with the same base headers."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self.headers = headers
        self._running: dict[object, HttpExchange] = {}

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        key: object,
        timeout_seconds: float | None = None,
    ) -> Generator[HttpExchange, None, None]:
        """Yield an exchange whose response has begun. Redirects within the same origin are followed.

        `key` identifies the exchange for `abort`. Raises OSError, HTTPException, ValueError.
        """
        url = self.url
        try:
            for _ in range(MAX_REDIRECTS):
                with HttpExchange(url, timeout_seconds) as exchange:
                    self._running[key] = exchange
                    exchange.send(method, {**self.headers, **headers}, body)
                    if exchange.response.status not in (307, 308):
                        yield exchange
                        return
                    url = self.resolve(exchange.header("location"))
            raise ValueError("too many redirects")
        finally:
            self._running.pop(key, None)

    def abort(self, key: object) -> None:
        exchange = self._running.pop(key, None)
        if exchange is not None:
            exchange.abort()

    def abort_all(self) -> None:
        for key in tuple(self._running):
            self.abort(key)

    def resolve(self, location: str) -> str:
        """Return the URL for a location, absolute or relative. Raises ValueError for another origin."""
        # The headers may hold credentials, so they must not go to another host.
        url = urllib.parse.urljoin(self.url, location)
        if _origin(url) != _origin(self.url):
            raise ValueError("redirected to another origin")
        return url


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


class SseParser:
    """Parses server-sent events as the HTML standard defines it and calls `on_event(type, data)` for each.

    `feed` raises RequestError (TOO_LONG) if an event exceeds the limit.
    """

    def __init__(self, on_event: Callable[[str, bytes], object], limit_bytes: int) -> None:
        self._on_event = on_event
        self._limit_bytes = limit_bytes
        self.last_id = ""
        self.retry_seconds: float | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a new connection: an incomplete event of the old one is dropped."""
        self._lines = LineSplitter(self._limit_bytes, self._on_line, lambda head, tail: self._refuse())
        self._type = ""
        self._data: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self._lines.feed(chunk)

    def _on_line(self, line: bytes) -> None:
        line = line.rstrip(b"\r")
        if not line:
            self._dispatch()
            return
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if name == b"data":
            self._data.append(value)
            self._size_bytes += len(value) + 1
            if self._size_bytes > self._limit_bytes:
                self._refuse()
        elif name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("latin-1")
        elif name == b"retry" and value.isdigit():
            self.retry_seconds = int(value[:9]) / 1000

    def _dispatch(self) -> None:
        event_type, data = self._type or "message", b"\n".join(self._data)
        self._type, self._data, self._size_bytes = "", [], 0
        if data:
            self._on_event(event_type, data)

    def _refuse(self) -> None:
        raise RequestError(wire.TOO_LONG, f"an event of more than {self._limit_bytes} bytes")
