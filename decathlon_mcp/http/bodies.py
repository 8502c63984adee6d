"""Reading the bodies of requests: limits for each, and for the memory of all that are in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from itertools import count

import anyio
import anyio.lowlevel
from starlette.types import Receive

from decathlon_mcp.episodes.admission import SHARE_PER_TOKEN, share_of
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.json_limits import MAX_NODES, JsonLimitError, check_json, count_nodes
from decathlon_mcp.protocol.messages import INVALID_REQUEST, McpError, readable_id
from decathlon_mcp.protocol.results import wire_error

MAX_BODY_BYTES = 4 << 20
"""Default limit of one body, as in the SDK: a file's content, and arguments around it."""
BODIES_IN_FLIGHT_BYTES = 256 << 20
"""Limit of all large bodies together: 64 of the largest. The server needs a few times their size."""
DECODED_IN_FLIGHT_BYTES = 256 << 20
"""Limit of what all bodies with many values need when they are decoded: 26 with the most values."""
NODE_BYTES = 100
"""What a value or a key needs when it is decoded: 64 bytes for an empty array, 80 for a key and a number."""
SMALL_BODY_BYTES = 8 << 10
"""Bodies up to this size are always read: the number of connections limits them."""
LARGE_BODY_BYTES = 256 << 10
"""A longer body takes milliseconds to decode."""
SMALL_DECODED_BYTES = 64 << 10
"""Bodies that need no more when they are decoded are not counted: the number of connections limits them."""
MAX_LENGTH_DIGITS = 15
WAIT_SECONDS = 20.0
"""How long a large body waits for others, before the request is refused."""
RETRY_SECONDS = 5.0
"""When to send a request again that was refused for that."""


class BodyDisconnectError(Exception):
    """The client disconnected before the end of its request's body."""


class MemoryBudget:
    """A number of bytes or places, shared in the order of arrival; each of several tokens may have a part.

    A token that has none may take more than its part at once.
    """

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._bytes_per_token = share_of(size_bytes, SHARE_PER_TOKEN)
        self._used_bytes = Counter[str | None]()
        self._numbers = count()
        # What each token waits for, with the numbers of arrival.
        self._waiting: dict[str | None, deque[tuple[int, int, anyio.Event]]] = {}

    async def acquire(self, size_bytes: int, token: str | None = None) -> None:
        """Take bytes from the budget, waiting until it has as many. Cancellation takes nothing.

        `token`: whose part is used; None if there is nobody to share with.
        """
        event = anyio.Event()
        place = next(self._numbers), size_bytes, event
        self._waiting.setdefault(token, deque()).append(place)
        self._admit()
        if event.is_set():
            return
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.release(size_bytes, token)
            else:
                self._remove(place, token)
                self._admit()
            raise

    def release(self, size_bytes: int, token: str | None = None) -> None:
        """Return bytes to the budget."""
        self.free_bytes += size_bytes
        self._used_bytes[token] -= size_bytes
        self._admit()

    def _admit(self) -> None:
        # Only the first of each token is looked at: one client can have thousands of requests that wait.
        while firsts := [
            (queue[0], token) for token, queue in self._waiting.items() if self._may_take(queue[0][1], token)
        ]:
            place, token = min(firsts)
            _, size_bytes, event = place
            if size_bytes > self.free_bytes:
                return  # what comes later does not take what this one waits for
            self._remove(place, token)
            self.free_bytes -= size_bytes
            self._used_bytes[token] += size_bytes
            event.set()

    def _may_take(self, size_bytes: int, token: str | None) -> bool:
        used_bytes = 0 if token is None else self._used_bytes[token]
        return used_bytes == 0 or used_bytes + size_bytes <= self._bytes_per_token

    def _remove(self, place: tuple[int, int, anyio.Event], token: str | None) -> None:
        queue = self._waiting[token]
        queue.remove(place)
        if not queue:
            del self._waiting[token]

    async def reserve(self, size_bytes: int, token: str | None = None) -> int:
        """`acquire`, which waits `WAIT_SECONDS` at the most. Returns the size. Raises McpError."""
        with anyio.move_on_after(WAIT_SECONDS):
            await self.acquire(size_bytes, token)
            return size_bytes
        text = "the server has too many large requests in progress; try again"
        raise wire_error(AtCapacityError(text, retryAfterSeconds=RETRY_SECONDS), status=503)


class BodyReader:
    """Reads bodies of at most `max_bytes` whose JSON is within the limits of `json_limits`."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_bytes = max_bytes
        # Two budgets: what waits for the second one holds a part of the first one, but what has both does not
        # wait any more, so that bodies cannot wait for each other.
        self.received = MemoryBudget(max(BODIES_IN_FLIGHT_BYTES, max_bytes))
        self.decoded = MemoryBudget(max(DECODED_IN_FLIGHT_BYTES, MAX_NODES * NODE_BYTES))
        self._turns = anyio.Lock()

    def check_length(self, headers: Mapping[bytes, bytes]) -> int:
        """The length that a request announces, 0 if it announces none. Raises McpError if it is too large."""
        length = body_length(headers) or 0
        if length > self.max_bytes:
            raise self._too_large()
        return length

    def _too_large(self) -> McpError:
        limit = f"{self.max_bytes / (1 << 20):g} MiB"
        return McpError(INVALID_REQUEST, f"the body of a request is limited to {limit}", status=413)

    @asynccontextmanager
    async def read(
        self, headers: Mapping[bytes, bytes], receive: Receive, token: str | None = None
    ) -> AsyncGenerator[bytes]:
        """The body of a request; the memory for it is reserved during the context.

        `token`: see `MemoryBudget.acquire`. Raises BodyDisconnectError, and McpError for one over a limit.
        """
        announced_bytes = self.check_length(headers) or self.max_bytes
        received_bytes = decoded_bytes = 0
        body: bytes | bytearray = b""
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise BodyDisconnectError
                part, more = message.get("body", b""), message.get("more_body", False)
                # The first part is mostly the whole, and is not copied.
                body = _joined(body, part) if body else part
                if len(body) > self.max_bytes:
                    raise self._too_large()
                if len(body) > SMALL_BODY_BYTES and not received_bytes:
                    # All at once: with reservations that grow, many bodies could wait for each other.
                    received_bytes = await self.received.reserve(announced_bytes, token)
            if received_bytes > len(body):
                self.received.release(received_bytes - len(body), token)
                received_bytes = len(body)
            if len(body) > LARGE_BODY_BYTES:
                # One in each round of the event loop: sixty at once kept it for seconds.
                async with self._turns:
                    await anyio.lowlevel.checkpoint()
            try:
                if (needed_bytes := _decoded_bytes(body)) > SMALL_DECODED_BYTES:
                    decoded_bytes = await self.decoded.reserve(needed_bytes, token)
            except McpError as error:
                if (request_id := readable_id(bytes(body))) is not None:
                    error.request_id, error.status = request_id, 200
                raise
            yield bytes(body)
        finally:
            if received_bytes or decoded_bytes:
                self.received.release(received_bytes, token)
                self.decoded.release(decoded_bytes, token)


def body_length(headers: Mapping[bytes, bytes]) -> int | None:
    """The length in these headers, 0 if there is none; None if it is not a plain number."""
    text = headers.get(b"content-length", b"0").strip()
    return int(text) if text.isdigit() and len(text) <= MAX_LENGTH_DIGITS else None


def _joined(body: bytes | bytearray, part: bytes) -> bytearray:
    body = body if isinstance(body, bytearray) else bytearray(body)
    body += part
    return body


def _decoded_bytes(body: bytes | bytearray) -> int:
    """Upper bound of what the values of a body need when it is decoded. Raises McpError over a limit."""
    try:
        nodes = check_json(body)
        if nodes * NODE_BYTES > SMALL_DECODED_BYTES:
            # Without the commas and brackets in strings, of which an honest file may have many.
            nodes = count_nodes(body)
    except JsonLimitError as error:
        raise McpError(INVALID_REQUEST, str(error), status=400) from None
    return nodes * NODE_BYTES
