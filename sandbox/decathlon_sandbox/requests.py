"""Requests from their arrival to their response: ids that were used, and requests that wait for room.

A request begins only if its longest response fits into the connection's send buffer in addition to those of
the requests in progress, so that a response is never refused. Until then its message is not acknowledged.
"""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.connection import RESERVED_BYTES
from decathlon_sandbox.resumable import OVERHEAD_BYTES
from decathlon_sandbox.rpc import Request, RequestError, error_response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.connection import Connection

    Dispatch = Callable[[Request, str, "dict[str, Any] | None"], object]

SMALL_METHODS = (wire.PING, wire.DIAL, wire.FORWARD, wire.RESOLVE, wire.SNAPSHOT, wire.FREEZE)
"""Methods whose responses are short. They do not wait behind large requests: a `ping` keeps the connection,
and `freeze` ends calls."""
SMALL_RESPONSE_BYTES = 64 * 1024


class Requests:
    """The requests of a driver. `dispatch` begins one."""

    def __init__(self, connection: Connection, dispatch: Dispatch) -> None:
        self._connection = connection
        self._dispatch = dispatch
        self._used_ids = UsedIds()
        # By id; those that wait are in the order of their arrival.
        self._waiting: dict[int, _ReceivedRequest] = {}
        self._running: dict[int, _ReceivedRequest] = {}
        self._reserved_bytes = 0
        self._is_beginning = False
        # The number of the response's message, until the server has acknowledged it.
        self._responses: dict[int, int] = {}

    def add(self, number: int, request_id: int, method: str, params: dict[str, Any] | None) -> None:
        """Begin a request, or keep it until there is room. `number` is that of its message.

        An id that was used before is ignored: the response is still to come, or is sent until the server
        acknowledges it. If the server has acknowledged it and asks again, it has lost the response.
        """
        if self._used_ids.add(request_id):
            request = Request(request_id, self._on_response)
            request.max_bytes = _max_response_bytes(method, params)
            self._waiting[request_id] = _ReceivedRequest(number, request, method, params)
            self.begin_waiting()
            return
        self._connection.acknowledge(number)
        response = self._responses.get(request_id)
        if request_id in self._running or request_id in self._waiting:
            return
        if response is None or self._connection.is_acknowledged(response):
            message = f"id {request_id} was answered before, and the answer was acknowledged"
            self.send_error(request_id, RequestError(wire.INVALID, message))

    def cancel(self, request_id: int) -> None:
        """Cancel a request, also one that has not begun. No effect if it was answered."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._connection.acknowledge(waiting.number)
            waiting.request.fail(RequestError(wire.CANCELLED, "the request was cancelled"))
        elif request_id in self._running:
            self._running[request_id].request.cancel()

    def begin_waiting(self) -> None:
        """Begin the requests for which there is room. Large ones begin in the order of their arrival."""
        if self._is_beginning:
            return
        self._is_beginning = True
        try:
            while (waiting := self._next()) is not None:
                del self._waiting[waiting.request.id]
                self._begin(waiting)
        finally:
            self._is_beginning = False

    def leave_no_room(self) -> bool:
        """Whether the responses to come may need the room that is left, so that other messages can wait."""
        free_bytes = self._connection.free_bytes - self._reserved_bytes
        return free_bytes < RESERVED_BYTES // 2

    def send_error(self, request_id: int | None, error: RequestError) -> None:
        self._connection.send(error_response(request_id, error))

    def _next(self) -> _ReceivedRequest | None:
        """The next request that can begin."""
        free_bytes = self._connection.free_bytes - self._reserved_bytes
        large_ones_wait = False
        for waiting in self._waiting.values():
            is_small = waiting.method in SMALL_METHODS
            needed_bytes = waiting.response_bytes + (0 if is_small else RESERVED_BYTES)
            if needed_bytes <= free_bytes and (is_small or not large_ones_wait):
                return waiting
            large_ones_wait = large_ones_wait or not is_small
        return None

    def _begin(self, waiting: _ReceivedRequest) -> None:
        self._running[waiting.request.id] = waiting
        self._reserved_bytes += waiting.response_bytes
        self._dispatch(waiting.request, waiting.method, waiting.params)
        self._connection.acknowledge(waiting.number)

    def _on_response(self, request: Request, data: bytes) -> None:
        running = self._running.pop(request.id, None)
        if running is not None:
            self._reserved_bytes -= running.response_bytes
        self._forget_acknowledged()
        self._responses[request.id] = self._connection.send(data)
        if self._waiting:
            self.begin_waiting()

    def _forget_acknowledged(self) -> None:
        # Responses are nearly in the order of their numbers.
        while self._responses:
            request_id, number = next(iter(self._responses.items()))
            if not self._connection.is_acknowledged(number):
                break
            del self._responses[request_id]


class _ReceivedRequest:
    """A request with the number of its message, and the room that its response needs."""

    __slots__ = ("method", "number", "params", "request", "response_bytes")

    def __init__(self, number: int, request: Request, method: str, params: dict[str, Any] | None) -> None:
        self.number = number
        self.request = request
        self.method = method
        self.params = params
        self.response_bytes = request.max_bytes + OVERHEAD_BYTES


def _max_response_bytes(method: str, params: dict[str, Any] | None) -> int:
    if method in SMALL_METHODS:
        return SMALL_RESPONSE_BYTES
    reply_bytes = params.get("max_bytes") if method == wire.CALL and params is not None else None
    if type(reply_bytes) is not int or not 0 <= reply_bytes <= wire.MAX_LINE_BYTES:
        return wire.MAX_RESPONSE_BYTES  # also of a request that will be refused
    # An error can be longer than the longest reply.
    return max(reply_bytes, SMALL_RESPONSE_BYTES) + wire.RESPONSE_MARGIN_BYTES


class UsedIds:
    """The request ids used so far: nearly in order within the generation of a server, so few are stored."""

    def __init__(self) -> None:
        self._generations: dict[int, _Counters] = {}

    def add(self, request_id: int) -> bool:
        """Add an id; return False if it was used before."""
        generation, counter = divmod(request_id, 1 << wire.COUNTER_BITS)
        counters = self._generations.get(generation)
        if counters is None:
            counters = self._generations[generation] = _Counters()
        return counters.add(counter)


class _Counters:
    """A set of nearly consecutive numbers from 1."""

    __slots__ = ("_above", "_all_up_to")

    def __init__(self) -> None:
        self._all_up_to = 0
        self._above: set[int] = set()

    def add(self, number: int) -> bool:
        """Add a number; return False if it was there before."""
        if number <= self._all_up_to or number in self._above:
            return False
        self._above.add(number)
        while self._all_up_to + 1 in self._above:
            self._all_up_to += 1
            self._above.remove(self._all_up_to)
        return True
