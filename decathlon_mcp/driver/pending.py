"""What a link keeps: requests without an outcome, responses to acknowledge, limits on notifications."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from decathlon_sandbox import wire
from decathlon_sandbox.lines import body_of_ids

from decathlon_mcp.background import Flag
from decathlon_mcp.driver.messages import Message, Notification
from decathlon_mcp.errors import SnapshotError
from decathlon_mcp.types import JsonObject, as_json_with_raw

OVERHEAD_BYTES = 100
"""Counted for every pending request in addition to its length, so that many short ones are bounded too."""
URGENT_BYTES = 64 << 10
"""Part of REQUEST_BUFFER_BYTES for urgent requests: a `ping`."""
NOTIFICATIONS_PER_SECOND = 2 * wire.NOTIFICATIONS_PER_SECOND
NOTIFICATIONS_BURST = 2 * wire.NOTIFICATIONS_BURST
"""Limits on the notifications of one sandbox that are passed on; the driver itself keeps half of it."""
NOTIFICATION_BYTES_PER_SECOND = 1 << 20
NOTIFICATION_BYTES_BURST = 8 << 20
DONE_AFTER_RESPONSES = 32
DONE_AFTER_BYTES = 64 << 10
DONE_AFTER_SECONDS = 0.25
"""Limits on responses that the driver keeps although they were handled: their number, their bytes and their
age. The next request names them without cost; a line of its own is written only if none comes. A quarter of a
second spares a busy link such lines, and frees the memory of an idle driver."""
COPIES_OF_COPIES = 256
"""Generations of one server process. A request's id is longer by so many bits."""


@dataclass(frozen=True, slots=True)
class Survival:
    """How a link continues after the loss of a stream or of a server process.

    `seconds`: how long the driver waits for a server, and a server for a new stream; with 0, the end of the
    stream is the end. `generation`: higher than that of every server process before, from 1. To a driver, a
    copy of its sandbox that is opened is another server process: see `of_copy`.
    """

    seconds: int = 0
    generation: int = 1

    @classmethod
    def of_server(cls, seconds: int, start: int) -> Self:
        """`start`: number of the server process, from 1. It has room for copies of copies."""
        return cls(seconds, start * COPIES_OF_COPIES)

    def of_copy(self, generation: int) -> Survival:
        """For a copy of a sandbox whose driver was attached to under this generation.

        Raises SnapshotError if there are too many copies of copies.
        """
        generation = max(self.generation, generation + 1)
        if generation >= self.generation + COPIES_OF_COPIES:
            raise SnapshotError(f"there are no more than {COPIES_OF_COPIES} copies of copies of copies")
        return Survival(self.seconds, generation)


NO_SURVIVAL = Survival()


class Request(msgspec.Struct, eq=False):
    """A request to the driver.

    `id`: from `DriverLink.new_id`, or that of a request of an earlier server process. `read`: makes the
    outcome of a reply with a `result`, which has not been checked; it runs in a thread if the reply is long.
    `on_outcome`: called once, with what `read` has returned or the DecathlonError that it or the driver has
    raised; with None if the link has closed. The driver keeps the reply until it has returned. Neither it nor
    `on_notification` may raise. `size_bytes`: length of its message, once it is pending. `is_read`: a thread
    reads its reply.
    """

    id: int
    method: str
    params: JsonObject
    read: Callable[[Message], Any]
    on_outcome: Callable[[Any], object]
    on_notification: Callable[[Notification], object] | None = None
    size_bytes: int = 0
    is_read: bool = False

    def message(self) -> bytes:
        return as_json_with_raw(
            {"jsonrpc": "2.0", "id": self.id, "method": self.method, "params": self.params}
        )


class PendingRequests(dict[int, Request]):
    """The requests without an outcome by their ids, and those that wait for room among them."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        # What wakes the requests that wait for room.
        self._waiting: dict[int, Flag] = {}

    def fits(self, message: bytes, *, urgent: bool = False) -> bool:
        """Whether there is room for a request with this message. `urgent`: see URGENT_BYTES."""
        reserved_bytes = OVERHEAD_BYTES + (0 if urgent else URGENT_BYTES)
        return self._bytes + len(message) + reserved_bytes <= wire.REQUEST_BUFFER_BYTES

    def add(self, request: Request, message: bytes) -> None:
        if request.id in self:
            raise ValueError(f"request {request.id} is pending already")
        request.size_bytes = len(message)
        self[request.id] = request
        self._bytes += len(message) + OVERHEAD_BYTES

    def take(self, request_id: int) -> Request | None:
        request = self.pop(request_id, None)
        if request is not None:
            self._bytes -= request.size_bytes + OVERHEAD_BYTES
            self.wake()
        return request

    async def wait(self, request_id: int) -> bool:
        """Wait until there may be room for a request; False if it was cancelled meanwhile."""
        self._waiting[request_id] = woken = Flag()
        try:
            await woken.wait()
            return request_id in self._waiting
        finally:
            self._waiting.pop(request_id, None)

    def cancel_waiting(self, request_id: int) -> None:
        if (woken := self._waiting.pop(request_id, None)) is not None:
            woken.set()

    def wake(self) -> None:
        """Let the requests that wait for room look again."""
        for woken in self._waiting.values():
            woken.set()


class Handled:
    """Requests whose responses have been handled, until `write` tells the driver so."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._ids: list[int] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request_id: int, size_bytes: int) -> None:
        self._ids.append(request_id)
        self._bytes += size_bytes
        if len(self._ids) >= DONE_AFTER_RESPONSES or self._bytes >= DONE_AFTER_BYTES:
            self._write()
        elif self._timer is None:
            # A timer: mostly, a request comes first.
            self._timer = asyncio.get_running_loop().call_later(DONE_AFTER_SECONDS, self._on_time)

    def take(self) -> list[bytes]:
        """The body of the line that names them; none if there are none."""
        bodies = [body_of_ids(b"done", self._ids)] if self._ids else []
        self.clear()
        return bodies

    def clear(self) -> None:
        self._ids.clear()
        self._bytes = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        self._timer = None
        if self._ids:
            self._write()


class NotificationLimit:
    """Limits on the notifications of one sandbox that are passed on."""

    def __init__(self) -> None:
        self._count = wire.TokenBucket(per_second=NOTIFICATIONS_PER_SECOND, burst=NOTIFICATIONS_BURST)
        self._bytes = wire.TokenBucket(
            per_second=NOTIFICATION_BYTES_PER_SECOND, burst=NOTIFICATION_BYTES_BURST
        )

    def take(self, size_bytes: int = 0) -> bool:
        """Whether a notification of that length may be passed on."""
        return (
            size_bytes <= wire.MAX_NOTIFICATION_BYTES and self._count.take() and self._bytes.take(size_bytes)
        )
