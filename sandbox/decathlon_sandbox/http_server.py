"""A server behind MCP's streamable HTTP: a POST for each message, JSON or an event stream in return."""

from __future__ import annotations

import threading

from decathlon_sandbox import wire
from decathlon_sandbox.events import Events
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.remote_server import (
    ERROR_BYTES,
    LIMIT_BYTES,
    NOTICE_SECONDS,
    TROUBLES,
    RemoteServer,
    answers,
    refusal,
)
from decathlon_sandbox.strict_json import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.site import Exchange

RECONNECT_SECONDS = 1.0
MAX_RECONNECT_SECONDS = 30.0
MAX_FAILURES = 3
"""Connections to one stream that end in a row, without an event in between."""
_NEVER = object()


class HttpServer(RemoteServer):
    _session_id = ""
    _protocol = ""
    _listening = False

    def open(self) -> None:
        self._sender.start()

    def agreed(self, protocol: str) -> None:
        self._protocol = protocol

    def _headers(self, **more: str) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream", **more}
        if self._session_id:
            headers["Mcp-Session-Id"] = self._session_id
        if self._protocol:
            headers["MCP-Protocol-Version"] = self._protocol
        return headers

    def _exchange(self, data: bytes, number: int | None) -> Fault | None:
        return self._persist(lambda: self._post(data, number))

    def _post(self, data: bytes, number: int | None) -> Fault | None:
        headers = self._headers(**{"Content-Type": "application/json"})
        key, seconds = (number, None) if number is not None else ("notice", NOTICE_SECONDS)
        with self._site.exchange("POST", headers, data, key=key, timeout_seconds=seconds) as exchange:
            if not 200 <= exchange.response.status < 300:
                return self._refused(exchange, number)
            self._session_id = self._session_id or exchange.header("mcp-session-id")
            if number is None:
                self._listen_once()
                return None
            kind = exchange.header("content-type").partition(";")[0].strip().lower()
            if kind == "application/json":
                return self._take_body(exchange, number)
            if kind != "text/event-stream":
                return self._fault(f"answered with {kind or 'nothing'}")
            stream = _Stream(self._hear, number)
            stream.follow(exchange)
        return self._resume(stream, number)

    def _take_body(self, exchange: Exchange, number: int) -> Fault | None:
        body = exchange.body(LIMIT_BYTES)
        if body is None:
            return Fault(wire.TOO_LONG, f"server {self.name} answered with more than {LIMIT_BYTES} bytes")
        return None if answers(self._hear(body), number) else self._fault("answered with something else")

    def _refused(self, exchange: Exchange, number: int | None) -> Fault | None:
        """An error of HTTP's: it may carry the reply; a 404 in a session is the end of the server."""
        said, body = refusal(exchange)
        if exchange.response.status == 404 and self._session_id and number is not None:
            self._in_loop(lambda: self.lost("has ended the session (HTTP 404)"))
        elif answers(_json(body), number):
            self._hear(body)
            return None
        return self._fault(said)

    def _resume(self, stream: _Stream, number: int) -> Fault | None:
        """A stream that ended without the reply goes on at its last event, where the server numbers them."""
        while not stream.answered:
            if not stream.events.last_id or number in self._given_up:
                return self._fault("ended its event stream without a reply")
            fault = self._follow_on(stream, number)
            if fault is not None:
                return fault
        return None

    def _follow_on(self, stream: _Stream, key: object) -> Fault | None:
        """Connect to a stream (again); why not any more."""
        if stream.failures > MAX_FAILURES or self._closing.is_set():
            return self._fault("ended its event stream and does not resume it")
        if stream.failures:
            seconds = stream.events.retry_seconds
            self._closing.wait(RECONNECT_SECONDS if seconds is None else min(seconds, MAX_RECONNECT_SECONDS))
        stream.failures += 1
        headers = self._headers(Accept="text/event-stream")
        if stream.events.last_id:
            headers["Last-Event-ID"] = stream.events.last_id
        try:
            with self._site.exchange("GET", headers, key=key) as exchange:
                if exchange.response.status != 200:
                    return self._fault(refusal(exchange)[0])
                stream.follow(exchange)
        except TROUBLES:
            pass
        return None

    def _listen_once(self) -> None:
        """After the first notification, which is `initialized`: hear what the server says unasked."""
        if not self._listening:
            self._listening = True
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        stream = _Stream(self._hear, _NEVER)
        try:
            while self._follow_on(stream, "listening") is None:
                pass  # most servers have nothing to say: 405 at once
        except Fault:
            pass

    def _say_goodbye(self) -> None:
        if self._session_id:
            try:
                with self._site.exchange(
                    "DELETE", self._headers(), key="goodbye", timeout_seconds=1.0
                ) as exchange:
                    exchange.body(ERROR_BYTES)
            except TROUBLES:
                pass


class _Stream:
    """One stream of events, over as many connections as it takes."""

    def __init__(self, hear: Callable[[bytes], Any], number: object) -> None:
        self._hear = hear
        self._number = number
        self.events = Events(self._take, LIMIT_BYTES)
        self.answered = False
        self.failures = 0
        """Connections that ended, since the last event."""

    def follow(self, exchange: Exchange) -> None:
        """Until the reply is there, or the connection ends however it does."""
        self.events.start_over()
        try:
            for chunk in exchange.chunks():
                self.events.feed(chunk)
                if self.answered:
                    return
        except TROUBLES:
            pass
        self.failures = max(self.failures, 1)

    def _take(self, kind: str, data: bytes) -> None:
        self.failures = 0
        if kind == "message" and answers(self._hear(data), self._number):
            self.answered = True


def _json(body: bytes) -> Any:
    try:
        return parse(body)[0]
    except ValueError:
        return None
