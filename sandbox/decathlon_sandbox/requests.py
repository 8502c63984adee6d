"""Requests from their arrival to their response: ids that were used, and requests that wait for room.

An id is never used for two requests, and that alone makes a request run once: a server that has lost its
stream, or a new server process, names the ids that it waits for. It gets the kept responses, and sends what
has never come.

A request begins only if its longest response fits into RESPONSE_BUFFER_BYTES in addition to those of the
requests in progress, so that a response is never refused.
"""

from __future__ import annotations

from bisect import bisect_right

from decathlon_sandbox import wire
from decathlon_sandbox.connection import OVERHEAD_BYTES, RESERVED_BYTES
from decathlon_sandbox.rpc import Request, RequestError, error_response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.connection import Connection

    Dispatch = Callable[[Request], object]

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
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._reserved_bytes = 0
        self._is_beginning = False

    def add(self, request_id: int, method: str, params: dict[str, Any] | None) -> None:
        """Begin a request, or keep it until there is room. One with an id that was used before never runs."""
        if self._used_ids.add(request_id):
            max_bytes = _max_response_bytes(method, params)
            self._waiting[request_id] = Request(request_id, method, params, max_bytes, self._on_response)
            self.begin_waiting()
        elif not self._is_to_be_answered(request_id):
            self._refuse_used(request_id)

    def resume(self, pending: list[int]) -> list[int]:
        """The server waits for these responses only; returns the ids of requests that have never come.

        Other requests of this server process have been cancelled while it was not attached. Those of an
        earlier process go on: what it has started, its successor needs.
        """
        waited_for = set(pending)
        for request_id in (*self._waiting, *self._running):
            if request_id not in waited_for and _generation(request_id) == self._connection.generation:
                self.cancel(request_id)
        unknown = [request_id for request_id in pending if request_id not in self._used_ids]
        for request_id in waited_for.difference(unknown):
            if not self._is_to_be_answered(request_id):
                self._refuse_used(request_id)
        return unknown

    def cancel(self, request_id: int) -> None:
        """Cancel a request, also one that has not begun or never comes. No effect if it was answered."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.fail(RequestError(wire.CANCELLED, "the request was cancelled"))
        elif request_id in self._running:
            self._running[request_id].cancel()
        else:
            # It may have been lost with a stream, and must not run if it comes late.
            self._used_ids.add(request_id)

    def begin_waiting(self) -> None:
        """Begin the requests for which there is room. Large ones begin in the order of their arrival."""
        if self._is_beginning:
            return
        self._is_beginning = True
        try:
            while (waiting := self._next()) is not None:
                del self._waiting[waiting.id]
                self._running[waiting.id] = waiting
                self._reserved_bytes += waiting.reserved_bytes + OVERHEAD_BYTES
                self._dispatch(waiting)
        finally:
            self._is_beginning = False

    def leave_no_room(self) -> bool:
        """Whether the responses to come may need the room that is left, so that other messages can wait."""
        free_bytes = self._connection.free_bytes - self._reserved_bytes
        return free_bytes < RESERVED_BYTES // 2

    def send_error(self, request_id: int | None, error: RequestError) -> None:
        """Answer what is no request, so that nobody waits for it for ever."""
        self._connection.notify(error_response(request_id, error))

    def _is_to_be_answered(self, request_id: int) -> bool:
        """Whether the response to a request is still to come, or is kept and sent."""
        is_in_progress = request_id in self._running or request_id in self._waiting
        return is_in_progress or self._connection.has_response(request_id)

    def _refuse_used(self, request_id: int) -> None:
        message = f"id {request_id} was answered before, and its response is not kept any more"
        self.send_error(request_id, RequestError(wire.INVALID, message))

    def _next(self) -> Request | None:
        """The next request that can begin."""
        free_bytes = self._connection.free_bytes - self._reserved_bytes
        large_ones_wait = False
        for waiting in self._waiting.values():
            is_small = waiting.method in SMALL_METHODS
            needed_bytes = waiting.reserved_bytes + OVERHEAD_BYTES + (0 if is_small else RESERVED_BYTES)
            if needed_bytes <= free_bytes and (is_small or not large_ones_wait):
                return waiting
            large_ones_wait = large_ones_wait or not is_small
        return None

    def _on_response(self, request: Request, data: bytes) -> None:
        if self._running.pop(request.id, None) is not None:
            self._reserved_bytes -= request.reserved_bytes + OVERHEAD_BYTES
        self._connection.respond(request.id, data)
        if self._waiting:
            self.begin_waiting()


def _max_response_bytes(method: str, params: dict[str, Any] | None) -> int:
    if method in SMALL_METHODS:
        return SMALL_RESPONSE_BYTES
    reply_bytes = params.get("max_bytes") if method == wire.CALL and params is not None else None
    if type(reply_bytes) is not int or not 0 <= reply_bytes <= wire.MAX_LINE_BYTES:
        return wire.MAX_RESPONSE_BYTES  # also of a request that will be refused
    # An error can be longer than the longest reply.
    return max(reply_bytes, SMALL_RESPONSE_BYTES) + wire.RESPONSE_MARGIN_BYTES


def _generation(request_id: int) -> int:
    return request_id >> wire.COUNTER_BITS


class UsedIds:
    """The request ids used so far, as ranges: they come nearly in order, so there are few.

    An id that its server never sends leaves a gap between two ranges.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, request_id: int) -> bool:
        index = bisect_right(self._firsts, request_id)
        return index > 0 and request_id <= self._lasts[index - 1]

    def add(self, request_id: int) -> bool:
        """Add an id; return False if it was used before."""
        if request_id in self:
            return False
        index = bisect_right(self._firsts, request_id)
        extends = index > 0 and self._lasts[index - 1] == request_id - 1
        precedes = index < len(self._firsts) and self._firsts[index] == request_id + 1
        if extends and precedes:
            del self._firsts[index]
            del self._lasts[index - 1]
        elif extends:
            self._lasts[index - 1] = request_id
        elif precedes:
            self._firsts[index] = request_id
        else:
            self._firsts.insert(index, request_id)
            self._lasts.insert(index, request_id)
        return True
