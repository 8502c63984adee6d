"""Reading the bodies of requests: limits for each, and for the memory of all that are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import anyio
from starlette.types import Receive

from decathlon_mcp.json_limits import MAX_NODES, JsonLimitError, check_json, count_nodes
from decathlon_mcp.protocol.messages import RequestId, readable_id

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
SMALL_DECODED_BYTES = 64 << 10
"""Bodies that need no more when they are decoded are not counted: the number of connections limits them."""
MAX_LENGTH_DIGITS = 15
WAIT_SECONDS = 20.0
"""How long a large body waits for others, before the request is refused."""


class BodyError(Exception):
    """A request is refused because of its body, with this HTTP status.

    `request_id`: that of the JSON-RPC request in the body, if it has been read.
    """

    def __init__(self, status: int, message: str, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.request_id: RequestId | None = None


class BodyDisconnectError(Exception):
    """The client disconnected before the end of its request's body."""


class MemoryBudget:
    """A number of bytes that is shared in the order of arrival."""

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    async def acquire(self, size_bytes: int) -> None:
        """Take bytes from the budget, waiting until it has as many. Cancellation takes nothing."""
        if not self._waiting and self.free_bytes >= size_bytes:
            self.free_bytes -= size_bytes
            return
        place = (size_bytes, anyio.Event())
        self._waiting.append(place)
        try:
            await place[1].wait()
        except BaseException:
            if place[1].is_set():
                self.release(size_bytes)
            else:
                self._waiting.remove(place)
                self.release(0)
            raise

    def release(self, size_bytes: int) -> None:
        """Return bytes to the budget."""
        self.free_bytes += size_bytes
        while self._waiting and self._waiting[0][0] <= self.free_bytes:
            granted_bytes, event = self._waiting.popleft()
            self.free_bytes -= granted_bytes
            event.set()

    async def reserve(self, size_bytes: int) -> int:
        """`acquire`, which waits `WAIT_SECONDS` at the most. Returns the size. Raises BodyError."""
        with anyio.move_on_after(WAIT_SECONDS):
            await self.acquire(size_bytes)
            return size_bytes
        raise BodyError(
            503, "the server has too many large requests in progress; try again", retry_after_seconds=5
        )


class BodyReader:
    """Reads bodies of at most `max_bytes` whose JSON is within the limits of `json_limits`."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_bytes = max_bytes
        # Two budgets: what waits for the second one holds a part of the first one, but what has both does not
        # wait any more, so that bodies cannot wait for each other.
        self.received = MemoryBudget(max(BODIES_IN_FLIGHT_BYTES, max_bytes))
        self.decoded = MemoryBudget(max(DECODED_IN_FLIGHT_BYTES, MAX_NODES * NODE_BYTES))

    def check_length(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise BodyError if the length that a request announces is over the limit."""
        if _length(headers) > self.max_bytes:
            raise self.too_large()

    def too_large(self) -> BodyError:
        """The error for a body that is over the limit."""
        return BodyError(413, f"the body of a request is limited to {self.max_bytes / (1 << 20):g} MiB")

    def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> BodyInFlight:
        """A context with the body of a request, which is counted as in flight while the context is open.

        Entering it raises BodyError, BodyDisconnectError.
        """
        return BodyInFlight(self, headers, receive)


class BodyInFlight:
    """See `BodyReader.read`."""

    # A class, because a generator's context costs as much as reading a short body.
    def __init__(self, reader: BodyReader, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._reader = reader
        self._headers = headers
        self._receive = receive
        self._received_bytes = self._decoded_bytes = 0
        """What is reserved of the reader's budgets."""

    async def __aenter__(self) -> bytes:
        self._reader.check_length(self._headers)
        try:
            body = await self._receive_all()
            try:
                size_bytes = decoded_bytes(body)
                if size_bytes > SMALL_DECODED_BYTES:
                    self._decoded_bytes = await self._reader.decoded.reserve(size_bytes)
            except BodyError as error:
                error.request_id = readable_id(bytes(body))
                raise
        except BaseException:
            self._release()
            raise
        return bytes(body)

    async def __aexit__(self, *error: object) -> None:
        self._release()

    async def _receive_all(self) -> bytes | bytearray:
        """The whole body; a large one is reserved."""
        reader = self._reader
        body: bytes | bytearray = b""
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise BodyDisconnectError
            part, more = message.get("body", b""), message.get("more_body", False)
            if body and part and not isinstance(body, bytearray):
                body = bytearray(body)
            # The first part is mostly the whole, and is not copied.
            body = body + part if body else part
            if len(body) > reader.max_bytes:
                raise reader.too_large()
            if len(body) > SMALL_BODY_BYTES and not self._received_bytes:
                # All at once: with reservations that grow, many bodies could wait for each other.
                announced_bytes = _length(self._headers) or reader.max_bytes
                self._received_bytes = await reader.received.reserve(announced_bytes)
        if self._received_bytes > len(body):
            reader.received.release(self._received_bytes - len(body))
            self._received_bytes = len(body)
        return body

    def _release(self) -> None:
        if self._received_bytes or self._decoded_bytes:
            self._reader.received.release(self._received_bytes)
            self._reader.decoded.release(self._decoded_bytes)
            self._received_bytes = self._decoded_bytes = 0


def _length(headers: Mapping[bytes, bytes]) -> int:
    """The length that a request announces; 0 if it announces none."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) < MAX_LENGTH_DIGITS else 0


def decoded_bytes(body: bytes | bytearray) -> int:
    """Upper bound of what the values of a body need when it is decoded. Raises BodyError over a limit."""
    try:
        nodes = check_json(body)
        if nodes * NODE_BYTES > SMALL_DECODED_BYTES:
            # Without the commas and brackets in strings, of which an honest file may have many.
            nodes = count_nodes(body)
    except JsonLimitError as error:
        raise BodyError(400, str(error)) from None
    return nodes * NODE_BYTES
