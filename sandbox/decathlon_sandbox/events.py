"""Server-sent events out of chunks, as the HTML standard parses them."""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.lines import Lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Events:
    """Calls `on_event` with type and data. `feed` raises Fault (TOO_LONG) past the limit."""

    def __init__(self, on_event: Callable[[str, bytes], object], limit_bytes: int) -> None:
        self._on_event = on_event
        self._limit_bytes = limit_bytes
        self.last_id = ""
        self.retry_seconds: float | None = None
        self.start_over()

    def start_over(self) -> None:
        """On a new connection: half an event from the old one is none."""
        self._lines = Lines(self._limit_bytes, self._take, lambda head, tail: self._refuse())
        self._type = ""
        self._data: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self._lines.feed(chunk)

    def _take(self, line: bytes) -> None:
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
        kind, data = self._type or "message", b"\n".join(self._data)
        self._type, self._data, self._size_bytes = "", [], 0
        if data:
            self._on_event(kind, data)

    def _refuse(self) -> None:
        raise Fault(wire.TOO_LONG, f"an event of more than {self._limit_bytes} bytes")
