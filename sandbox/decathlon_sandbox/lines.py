"""Chunks into lines of bounded length."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

EDGE_BYTES = 1024


class Lines:
    """Calls `on_line` with every line, without its end.

    Half a line at the end of all is none. Of a line longer than `limit_bytes` only the first and the last
    kilobyte are kept, for `on_overlong`.
    """

    def __init__(
        self,
        limit_bytes: int,
        on_line: Callable[[bytes], object],
        on_overlong: Callable[[bytes, bytes], object],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._on_line = on_line
        self._on_overlong = on_overlong
        self._kept = bytearray()
        self._head: bytes | None = None

    def feed(self, chunk: bytes) -> None:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            if self._kept or len(line) > self._limit_bytes:
                self._keep(line)
                self._finish()
            else:
                self._on_line(line)
        if rest:
            self._keep(rest)

    def _finish(self) -> None:
        kept, self._kept = bytes(self._kept), bytearray()
        head, self._head = self._head, None
        if head is not None:
            self._on_overlong(head, kept)
        else:
            self._on_line(kept)

    def _keep(self, part: bytes) -> None:
        self._kept += part
        if self._head is None and len(self._kept) > self._limit_bytes:
            self._head = bytes(self._kept[:EDGE_BYTES])
        if self._head is not None:
            del self._kept[:-EDGE_BYTES]
