"""HTTP with one place: each exchange on a connection of its own, in a thread, to be aborted from another.

No connection is used twice: a request lost on a stale one could not be told from one that was done.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import urllib.parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

CONNECT_SECONDS = 10.0
MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 16


class Exchange:
    """One request and its response; a context manager that closes."""

    def __init__(self, url: str, timeout_seconds: float | None) -> None:
        parts = urllib.parse.urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise ValueError(f"not an address: {parts.scheme}://{parts.netloc}")
        self._target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=CONNECT_SECONDS)
        self._timeout_seconds = timeout_seconds
        self._socket: socket.socket | None = None
        self._aborted = False
        self.response: http.client.HTTPResponse

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, method: str, headers: Mapping[str, str], body: bytes | None) -> None:
        """Until the response's headers are there. Raises OSError, HTTPException."""
        self._connection.connect()
        self._socket = self._connection.sock
        if self._socket is not None:
            self._socket.settimeout(self._timeout_seconds)
        if self._aborted:
            raise ConnectionAbortedError("given up")
        self._connection.request(method, self._target, body, dict(headers))
        self.response = self._connection.getresponse()

    def chunks(self) -> Iterator[bytes]:
        while chunk := self.response.read1(CHUNK_BYTES):
            yield chunk

    def body(self, limit_bytes: int) -> bytes | None:
        """The whole of it; None when it is longer. Raises ConnectionResetError when it breaks off."""
        data = bytearray()
        for chunk in self.chunks():
            data += chunk
            if len(data) > limit_bytes:
                return None
        promised = self.header("content-length")
        if promised.isdigit() and len(data) < int(promised):
            raise ConnectionResetError("the answer breaks off")
        return bytes(data)

    def header(self, name: str) -> str:
        return self.response.headers.get(name, "")

    def abort(self) -> None:
        """End it from another thread."""
        self._aborted = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Site:
    """An address and the headers that go with every request to it."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self.headers = headers
        self._live: dict[object, Exchange] = {}

    @contextlib.contextmanager
    def exchange(
        self,
        method: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        key: object,
        timeout_seconds: float | None = None,
    ) -> Generator[Exchange, None, None]:
        """An exchange whose response has begun; redirects within the same origin are followed.

        `key` is what `abort` knows it by. Raises OSError, HTTPException, ValueError.
        """
        url = self.url
        try:
            for _ in range(MAX_REDIRECTS):
                with Exchange(url, timeout_seconds) as exchange:
                    self._live[key] = exchange
                    exchange.send(method, {**self.headers, **headers}, body)
                    if exchange.response.status not in (307, 308):
                        yield exchange
                        return
                    url = self.beside(exchange.header("location"))
            raise ValueError("redirected too often")
        finally:
            self._live.pop(key, None)

    def abort(self, key: object) -> None:
        exchange = self._live.pop(key, None)
        if exchange is not None:
            exchange.abort()

    def abort_all(self) -> None:
        for key in tuple(self._live):
            self.abort(key)

    def beside(self, location: str) -> str:
        """`location`, which may be relative; raises ValueError where it lies elsewhere than we do."""
        url = urllib.parse.urljoin(self.url, location)
        if _origin(url) != _origin(self.url):
            raise ValueError("sent elsewhere")
        return url


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc
