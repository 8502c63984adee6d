"""Task servers reached by URL: streamable HTTP, and the older HTTP+SSE transport.

Their HTTP requests block, so they run in threads; what they receive is passed to the event loop.
"""

from __future__ import annotations

import queue
import threading
import time

from decathlon_sandbox import wire
from decathlon_sandbox.http_client import HTTP_ERRORS, HttpClient, SseParser
from decathlon_sandbox.rpc import RequestError, describe_error
from decathlon_sandbox.server import Server
from decathlon_sandbox.strict_json import as_object, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from decathlon_sandbox.event_loop import EventLoop
    from decathlon_sandbox.http_client import HttpExchange
    from decathlon_sandbox.rpc import Params
    from decathlon_sandbox.streams import Backpressure

    T = TypeVar("T")

NOTIFICATION_SECONDS = 10.0
"""Timeout of an exchange that no caller waits for."""
REFUSED_SECONDS = 5.0
"""How long after its start a server may refuse connections: a task's set-up may have just launched it."""
RETRY_SECONDS = 0.2
ERROR_BODY_BYTES = 4096
MAX_UNHANDLED_MESSAGES = 16
"""Messages that the event loop has not handled yet, before threads wait for it."""
MAX_MESSAGE_BYTES = wire.MAX_LINE_BYTES - 1024
RECONNECT_SECONDS = 1.0
MAX_RECONNECT_SECONDS = 30.0
MAX_FAILED_CONNECTIONS = 3
"""Connections of one event stream in a row that end without an event."""
_NO_REQUEST = object()


class RemoteServer(Server):
    """Common part of the HTTP transports.

    Messages are sent in order. Replies arrive in threads and are passed to the event loop.
    """

    def __init__(self, loop: EventLoop, backpressure: Backpressure, settings: Params) -> None:
        super().__init__(settings.string("name"), settings.optional_number("request_seconds"))
        self._loop = loop
        self._backpressure = backpressure
        self._client = HttpClient(settings.string("url"), settings.string_mapping("headers"))
        self._outbox: queue.SimpleQueue[tuple[bytes, int | None] | None] = queue.SimpleQueue()
        self._unhandled = threading.Semaphore(MAX_UNHANDLED_MESSAGES)
        self._abandoned: set[int] = set()
        self._closing = threading.Event()
        self._sender = threading.Thread(target=self._send_outbox, daemon=True)

    def send(self, data: bytes, request_id: int | None) -> None:
        self._outbox.put((data, request_id))

    def abandon(self, request_id: int) -> None:
        self._abandoned.add(request_id)
        self._client.abort(request_id)

    def mark_lost(self, reason: str) -> None:
        super().mark_lost(reason)
        self.begin_close()

    def begin_close(self) -> None:
        self._closing.set()
        self._client.abort_all()
        self._outbox.put(None)

    def wait_closed(self, deadline: float) -> None:
        if self._sender.ident is not None:
            self._sender.join(max(0.0, deadline - time.monotonic()))

    def stop(self, on_done: Callable[[], object]) -> None:
        self.begin_close()
        on_done()

    # in threads

    def _send_outbox(self) -> None:
        # Each request has its own thread. Notifications and responses are sent before the next message,
        # because their order relative to it matters (`notifications/initialized`, for example).
        while (item := self._outbox.get()) is not None:
            data, request_id = item
            if request_id is None:
                self._send_notification(data)
            else:
                self._start_request(data, request_id)
        self._end_session()

    def _start_request(self, data: bytes, request_id: int) -> None:
        try:
            threading.Thread(target=self._send_request, args=(data, request_id), daemon=True).start()
        except RuntimeError as thread_error:  # the sandbox's limit of processes and threads is reached
            error = self._server_error(f"cannot be called: {thread_error}")
            self._run_in_loop(lambda: self.session.fail(request_id, error))

    def _send_request(self, data: bytes, request_id: int) -> None:
        try:
            error = self._exchange(data, request_id)
        except RequestError as request_error:
            error = request_error
        except HTTP_ERRORS as http_error:
            error = self._server_error(f"cannot be reached: {describe_error(http_error)}")
        self._abandoned.discard(request_id)
        if error is not None:
            self._run_in_loop(lambda: self.session.fail(request_id, error))

    def _send_notification(self, data: bytes) -> None:
        try:
            self._exchange(data, None)
        except (*HTTP_ERRORS, RequestError):
            pass  # the server is gone; its calls report that

    def _exchange(self, data: bytes, request_id: int | None) -> RequestError | None:
        """Send one message and deliver what comes back. Return why a request gets no reply, if known."""
        raise NotImplementedError

    def _end_session(self) -> None:
        """Tell the server that the session is over, if the transport has a way to."""

    def _retry_refused(self, attempt: Callable[[], T]) -> T:
        """Retry while connections are refused and the server was started a short time ago."""
        while True:
            try:
                return attempt()
            except ConnectionRefusedError:
                too_late = time.monotonic() - self.started_at > REFUSED_SECONDS
                if too_late or self._closing.wait(RETRY_SECONDS):
                    raise

    def _deliver(self, data: bytes) -> Any:
        """Pass a message to the session. Return it parsed, or None if it is not JSON."""
        # A message becomes one line. Inside strings JSON cannot contain line ends; outside they are spaces.
        line = data.replace(b"\r", b" ").replace(b"\n", b" ")
        try:
            message, line = parse(line)
        except ValueError:
            self._run_in_loop(lambda: self.session.receive_line(line))
            return None
        self._run_in_loop(lambda: self.session.receive_message(message, line))
        return message

    def _run_in_loop(self, callback: Callable[[], object]) -> None:
        """Pass a callback to the event loop, not faster than the loop and the server handle them."""
        self._backpressure.wait()
        self._unhandled.acquire()

        def run() -> None:
            self._unhandled.release()
            callback()

        self._loop.call_soon_threadsafe(run)

    def _server_error(self, what: str) -> RequestError:
        return RequestError(wire.SERVER, f"server {self.name} {what}", {"server": self.name})


class StreamableHttpServer(RemoteServer):
    """A POST for every message, answered with JSON or an event stream."""

    _session_id = ""
    _protocol = ""
    _listening = False

    def open(self) -> None:
        self._sender.start()

    def set_protocol(self, version: str) -> None:
        self._protocol = version

    def _headers(self, extra: dict[str, str]) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream", **extra}
        if self._session_id:
            headers["Mcp-Session-Id"] = self._session_id
        if self._protocol:
            headers["MCP-Protocol-Version"] = self._protocol
        return headers

    def _exchange(self, data: bytes, request_id: int | None) -> RequestError | None:
        return self._retry_refused(lambda: self._post(data, request_id))

    def _post(self, data: bytes, request_id: int | None) -> RequestError | None:
        headers = self._headers({"Content-Type": "application/json"})
        key, seconds = (
            (request_id, None) if request_id is not None else ("notification", NOTIFICATION_SECONDS)
        )
        with self._client.request("POST", headers, data, key=key, timeout_seconds=seconds) as exchange:
            if not 200 <= exchange.response.status < 300:
                return self._handle_http_error(exchange, request_id)
            self._session_id = self._session_id or exchange.header("mcp-session-id")
            if request_id is None:
                self._start_listening()
                return None
            content_type = exchange.header("content-type").partition(";")[0].strip().lower()
            if content_type == "application/json":
                return self._deliver_body(exchange, request_id)
            if content_type != "text/event-stream":
                return self._server_error(f"answered with {content_type or 'no content type'}")
            stream = _EventStream(self._deliver, request_id)
            stream.read(exchange)
        return self._resume_until_answered(stream, request_id)

    def _deliver_body(self, exchange: HttpExchange, request_id: int) -> RequestError | None:
        body = exchange.body(MAX_MESSAGE_BYTES)
        if body is None:
            message = f"server {self.name} answered with more than {MAX_MESSAGE_BYTES} bytes"
            return RequestError(wire.TOO_LONG, message)
        if _is_reply_to(self._deliver(body), request_id):
            return None
        return self._server_error("answered with something other than the reply")

    def _handle_http_error(self, exchange: HttpExchange, request_id: int | None) -> RequestError | None:
        # The body can hold the reply. A 404 within a session means that the server has ended the session.
        description, body = _describe_http_error(exchange)
        if exchange.response.status == 404 and self._session_id and request_id is not None:
            self._run_in_loop(lambda: self.mark_lost("has ended the session (HTTP 404)"))
        elif _is_reply_to(_parse_or_none(body), request_id):
            self._deliver(body)
            return None
        return self._server_error(description)

    def _resume_until_answered(self, stream: _EventStream, request_id: int) -> RequestError | None:
        """Resume a stream that ended without the reply at its last event, if the server numbers events."""
        while not stream.answered:
            if not stream.parser.last_id or request_id in self._abandoned:
                return self._server_error("ended its event stream without a reply")
            error = self._resume(stream, request_id)
            if error is not None:
                return error
        return None

    def _resume(self, stream: _EventStream, key: object) -> RequestError | None:
        """Connect to a stream and read it; return an error if it cannot be resumed any more."""
        if stream.failed_connections > MAX_FAILED_CONNECTIONS or self._closing.is_set():
            return self._server_error("ended its event stream and does not resume it")
        if stream.failed_connections:
            seconds = stream.parser.retry_seconds
            self._closing.wait(RECONNECT_SECONDS if seconds is None else min(seconds, MAX_RECONNECT_SECONDS))
        stream.failed_connections += 1
        headers = self._headers({"Accept": "text/event-stream"})
        if stream.parser.last_id:
            headers["Last-Event-ID"] = stream.parser.last_id
        try:
            with self._client.request("GET", headers, key=key) as exchange:
                if exchange.response.status != 200:
                    return self._server_error(_describe_http_error(exchange)[0])
                stream.read(exchange)
        except HTTP_ERRORS:
            pass
        return None

    def _start_listening(self) -> None:
        """After the first notification (`initialized`), listen for messages outside of any request."""
        if not self._listening:
            self._listening = True
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        stream = _EventStream(self._deliver, _NO_REQUEST)
        try:
            while self._resume(stream, "listening") is None:
                pass  # most servers offer no such stream and answer 405 at once
        except RequestError:
            pass

    def _end_session(self) -> None:
        if self._session_id:
            try:
                with self._client.request(
                    "DELETE", self._headers({}), key="delete", timeout_seconds=1.0
                ) as exchange:
                    exchange.body(ERROR_BODY_BYTES)
            except HTTP_ERRORS:
                pass


class SseServer(RemoteServer):
    """The older HTTP+SSE transport: one event stream for everything received, a POST for every message sent.

    The server is lost when its event stream ends.
    """

    def __init__(self, loop: EventLoop, backpressure: Backpressure, settings: Params) -> None:
        super().__init__(loop, backpressure, settings)
        self._endpoint: HttpClient | None = None

    def open(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def begin_close(self) -> None:
        super().begin_close()
        if self._endpoint is not None:
            self._endpoint.abort_all()

    def abandon(self, request_id: int) -> None:
        super().abandon(request_id)
        if self._endpoint is not None:
            self._endpoint.abort(request_id)

    def _listen(self) -> None:
        try:
            reason = self._retry_refused(self._read_events)
        except RequestError as error:
            reason = f"failed: {error.message}"
        except HTTP_ERRORS as error:
            reason = f"cannot be reached: {describe_error(error)}"
        self._run_in_loop(lambda: self.mark_lost(reason))

    def _read_events(self) -> str:
        """Read the event stream until it ends; return why it ended."""
        with self._client.request("GET", {"Accept": "text/event-stream"}, key="listening") as exchange:
            if exchange.response.status != 200:
                return _describe_http_error(exchange)[0]
            parser = SseParser(self._on_event, MAX_MESSAGE_BYTES)
            for chunk in exchange.chunks():
                parser.feed(chunk)
        return "closed its event stream"

    def _on_event(self, event_type: str, data: bytes) -> None:
        if event_type == "endpoint" and self._endpoint is None:
            self._endpoint = HttpClient(self._client.resolve(data.decode("utf-8")), self._client.headers)
            self._sender.start()
        elif event_type == "message":
            self._deliver(data)

    def _exchange(self, data: bytes, request_id: int | None) -> RequestError | None:
        endpoint = self._endpoint
        if endpoint is None:
            return self._server_error("has no address for messages")
        key = request_id if request_id is not None else "notification"
        headers = {"Content-Type": "application/json"}
        with endpoint.request(
            "POST", headers, data, key=key, timeout_seconds=NOTIFICATION_SECONDS
        ) as exchange:
            ok = 200 <= exchange.response.status < 300
            return None if ok else self._server_error(_describe_http_error(exchange)[0])


class _EventStream:
    """An event stream of streamable HTTP, over any number of connections.

    `answered`: the reply to `request_id` has arrived. `failed_connections`: connections that ended since the
    last event.
    """

    def __init__(self, deliver: Callable[[bytes], Any], request_id: object) -> None:
        self._deliver = deliver
        self._request_id = request_id
        self.parser = SseParser(self._on_event, MAX_MESSAGE_BYTES)
        self.answered = False
        self.failed_connections = 0

    def read(self, exchange: HttpExchange) -> None:
        """Read until the reply has arrived or the connection ends, in whatever way."""
        self.parser.reset()
        try:
            for chunk in exchange.chunks():
                self.parser.feed(chunk)
                if self.answered:
                    return
        except HTTP_ERRORS:
            pass
        self.failed_connections = max(self.failed_connections, 1)

    def _on_event(self, event_type: str, data: bytes) -> None:
        self.failed_connections = 0
        if event_type == "message" and _is_reply_to(self._deliver(data), self._request_id):
            self.answered = True


def _describe_http_error(exchange: HttpExchange) -> tuple[str, bytes]:
    """Return a description of an HTTP error response, and its body."""
    body = exchange.body(ERROR_BODY_BYTES) or b""
    text = body.decode("utf-8", "replace").strip()
    return f"answered HTTP {exchange.response.status}" + (f": {text}" if text else ""), body


def _is_reply_to(value: Any, request_id: object) -> bool:
    message = as_object(value)
    return message is not None and "method" not in message and message.get("id") == request_id


def _parse_or_none(body: bytes) -> Any:
    try:
        return parse(body)[0]
    except ValueError:
        return None
