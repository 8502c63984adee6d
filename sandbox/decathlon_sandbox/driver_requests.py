"""Requests from the server, from their arrival to their only response.

An id is never used for two requests, and that alone makes a request run once. A request begins only if there
is room for its longest response, so that a response is never refused (`wire`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection

from decathlon_sandbox import wire
from decathlon_sandbox.event_loop import EventLoop, log_exception
from decathlon_sandbox.lines import body_of_ids
from decathlon_sandbox.strict_json import JsonObject, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from decathlon_sandbox.driver_end import Connection

    T = TypeVar("T")


Notify = Callable[[str, JsonObject], object]
"""Sends a notification, with its method and params."""
OVERHEAD_BYTES = 100
"""Counted for every response in addition to its length, which bounds many short responses too. About what an
entry of a dictionary, its key and the header of a `bytes` object occupy."""
HIGH_WATER_BYTES = 8 << 20
"""Backpressure begins at so many bytes that the server may still need: twice the largest usual reply."""
RESERVED_BYTES = 2 * HIGH_WATER_BYTES
"""Part of RESPONSE_BUFFER_BYTES that responses to large requests do not use: for the data of tunnels, which
stops at HIGH_WATER_BYTES, for other notifications, and for small responses, such as to `ping`."""
SMALL_METHODS = (wire.PING, wire.DIAL, wire.FORWARD, wire.RESOLVE, wire.SNAPSHOT, wire.FREEZE)
"""Methods whose responses are short. They do not wait behind large requests: a `ping` keeps the connection,
and `freeze` ends calls."""
SMALL_RESPONSE_BYTES = 64 * 1024
_REQUEST_ID = re.compile(rb'\{"jsonrpc":"2\.0","id":(\d{1,18}),')
"""How the server begins a request. For messages that cannot be read."""


class RequestError(Exception):
    """Failure of a request, with a code of the wire's table. `data` holds JSON values."""

    def __init__(self, code: int, message: str, data: JsonObject | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data or {}


def describe_error(error: Exception) -> str:
    """Return an exception's message; for an OSError with the file concerned."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def error_response(request_id: int | None, error: RequestError) -> bytes:
    fields: JsonObject = {"code": error.code, "message": error.message}
    if error.data:
        fields["data"] = error.data
    return encode({"jsonrpc": "2.0", "id": request_id, "error": fields})


class Request:
    """A request from its arrival to its response.

    `on_cancel` is called when the server cancels the request; it must lead to a response. Without it, the
    request goes on to its end. `max_bytes` is the length of the longest response.
    """

    def __init__(
        self,
        request_id: int,
        method: str,
        params: JsonObject,
        on_response: Callable[[Request, bytes], object],
    ) -> None:
        self.id = request_id
        self.method = method
        self.params = params
        self.max_bytes = _max_response_bytes(method, params)
        self.answered = False
        self.on_cancel: Callable[[], object] | None = None
        self._on_response = on_response

    def reply(self, result: JsonObject) -> None:
        self.reply_encoded(encode(result))

    def reply_encoded(self, result: bytes, overlong: bytes | None = None) -> None:
        """Reply with a result that is JSON already. `overlong`: JSON about a result that was shortened."""
        about = b"" if overlong is None else b'"overlong":%b,' % overlong
        self._respond(b'{"jsonrpc":"2.0","id":%d,%b"result":%b}' % (self.id, about, result))

    def fail(self, error: RequestError) -> None:
        self._respond(error_response(self.id, error))

    def _respond(self, data: bytes) -> None:
        if self.answered:
            return
        if len(data) > self.max_bytes:
            message = f"the response has {len(data)} bytes, more than the limit of {self.max_bytes} bytes"
            data = error_response(self.id, RequestError(wire.TOO_LONG, message))
        self.answered = True
        self.on_cancel = None
        self._on_response(self, data)


def answer_in_thread(
    loop: EventLoop,
    request: Request,
    work: Callable[[], T],
    reply: Callable[[T], object],
) -> None:
    """Run `work`, which may block, in a thread, then in the loop `reply` with its result, or fail.

    RequestError, and OSError, ValueError and RecursionError as FILES, are expected errors. Without a
    thread it fails with SPAWN: the sandbox's processes may have taken all that its limit allows.
    """

    def run() -> None:
        try:
            result = work()
        except RequestError as error:
            failure = error
        except (OSError, ValueError, RecursionError) as error:
            failure = RequestError(wire.FILES, describe_error(error))
        except Exception as error:  # noqa: BLE001  (the request must be answered in any case)
            failure = RequestError(wire.INTERNAL, f"{type(error).__name__}: {error}")
        else:
            loop.call_soon_threadsafe(lambda: reply(result))
            return
        loop.call_soon_threadsafe(lambda: request.fail(failure))

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:
        request.fail(RequestError(wire.SPAWN, f"the driver cannot start a thread: {error}"))


class Requests:
    """The requests of a driver, and their responses until the server is done with them.

    `begin` starts the work of one and may raise; `on_notification` gets other messages than requests and
    their cancellations.
    """

    def __init__(
        self,
        connection: Connection,
        begin: Callable[[Request], object],
        on_notification: Callable[[str, JsonObject], object],
    ) -> None:
        self._connection = connection
        self._begin = begin
        self._on_notification = on_notification
        self._used_ids = set[int]()
        """All ids until now: some 90 bytes each, and an episode has as many calls as its log has room for."""
        # By id, in the order of their arrival.
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._reserved_bytes = 0
        self._is_beginning = False
        # Responses that the server may need again.
        self._responses: dict[int, bytes] = {}
        self.response_bytes = 0

    def receive(self, payload: bytes) -> None:
        """Handle a message. An unreadable message, such as a number of 5,000 digits, fails its request."""
        try:
            # Unpaired surrogates are accepted: they may be part of a tool's arguments.
            message = json.loads(payload.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            match = _REQUEST_ID.match(payload)
            failure = RequestError(wire.PARSE, f"not JSON: {error}")
            self._refuse(int(match.group(1)) if match is not None else None, failure)
            return
        method, params = message["method"], message["params"]
        if "id" in message:
            self._add(message["id"], method, params)
        elif method == wire.CANCEL:
            self._cancel(params["id"])
        else:
            self._on_notification(method, params)

    def resume(self, pending: list[int]) -> None:
        """The server waits for these responses only: name the requests that have never come, send the rest.

        Other responses are forgotten. Other requests of this server process have been cancelled while it was
        not attached. Requests of an earlier process go on: its successor needs what they do.
        """
        waited_for = set(pending)
        for request_id in (*self._waiting, *self._running):
            generation = request_id >> wire.COUNTER_BITS
            if request_id not in waited_for and generation == self._connection.generation:
                self._cancel(request_id)
        self.forget(self._responses.keys() - waited_for)
        unknown = [request_id for request_id in pending if request_id not in self._used_ids]
        self._connection.send(body_of_ids(b"unknown", unknown))
        for request_id in waited_for.difference(unknown):
            self._answer_again(request_id)

    def forget(self, ids: Collection[int]) -> None:
        """The server is done with these responses."""
        for request_id in ids:
            payload = self._responses.pop(request_id, None)
            if payload is not None:
                self.response_bytes -= len(payload) + OVERHEAD_BYTES

    def begin_waiting(self) -> None:
        """Begin the requests for which there is room. Large requests begin in the order of their arrival."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while (request := self._next()) is not None:
            del self._waiting[request.id]
            self._running[request.id] = request
            self._reserved_bytes += request.max_bytes + OVERHEAD_BYTES
            try:
                self._begin(request)
            except RequestError as error:
                request.fail(error)
            except Exception as error:  # noqa: BLE001  (an error in one request must not end the others)
                log_exception(f"{request.method} failed")
                request.fail(RequestError(wire.INTERNAL, f"{type(error).__name__}: {error}"))
        self._is_beginning = False

    @property
    def free_bytes(self) -> int:
        """How much of RESPONSE_BUFFER_BYTES is neither used nor reserved for the responses to come."""
        used_bytes = self.response_bytes + self._connection.notification_bytes + self._reserved_bytes
        return wire.RESPONSE_BUFFER_BYTES - used_bytes

    def _add(self, request_id: int, method: str, params: JsonObject) -> None:
        """Begin a request, or keep it until there is room. A request with a used id never runs."""
        if request_id in self._used_ids:
            self._answer_again(request_id)
            return
        self._used_ids.add(request_id)
        self._waiting[request_id] = Request(request_id, method, params, self._on_response)
        self.begin_waiting()

    def _cancel(self, request_id: int) -> None:
        """Cancel a request, also one that has not begun or never comes. No effect if it was answered."""
        if request_id in self._waiting:
            request = self._waiting.pop(request_id)
            request.fail(RequestError(wire.CANCELLED, "the request was cancelled"))
        elif request_id in self._running:
            on_cancel = self._running[request_id].on_cancel
            if on_cancel is not None:
                on_cancel()
        else:
            # It may have been lost with a stream, and must not run if it comes late.
            self._used_ids.add(request_id)

    def _answer_again(self, request_id: int) -> None:
        """Send the response to a request that has come before, unless it is still to come."""
        if request_id in self._responses:
            self._connection.send(self._responses[request_id])
        elif request_id not in self._running and request_id not in self._waiting:
            message = f"id {request_id} was answered before, and its response is not kept any more"
            self._refuse(request_id, RequestError(wire.INVALID, message))

    def _refuse(self, request_id: int | None, error: RequestError) -> None:
        """Answer what is no request, so that nobody waits for it for ever."""
        self._connection.notify(error_response(request_id, error))

    def _next(self) -> Request | None:
        """The next request that can begin."""
        free_bytes = self.free_bytes
        large_ones_wait = False
        for request in self._waiting.values():
            is_small = request.method in SMALL_METHODS
            needed_bytes = request.max_bytes + OVERHEAD_BYTES + (0 if is_small else RESERVED_BYTES)
            if needed_bytes <= free_bytes and (is_small or not large_ones_wait):
                return request
            large_ones_wait = large_ones_wait or not is_small
        return None

    def _on_response(self, request: Request, data: bytes) -> None:
        if self._running.pop(request.id, None) is not None:
            self._reserved_bytes -= request.max_bytes + OVERHEAD_BYTES
        self._responses[request.id] = data
        self.response_bytes += len(data) + OVERHEAD_BYTES
        self._connection.send(data)
        self.begin_waiting()


def _max_response_bytes(method: str, params: JsonObject) -> int:
    if method in SMALL_METHODS:
        return SMALL_RESPONSE_BYTES
    if method != wire.CALL:
        return wire.MAX_RESPONSE_BYTES
    # An error can be longer than the longest reply.
    return max(params.get("max_bytes", 0), SMALL_RESPONSE_BYTES) + wire.RESPONSE_MARGIN_BYTES
