"""The last of what a process said, of bounded size."""

from __future__ import annotations

LOG_TAIL_BYTES = 8192


class LogTail:
    """Keeps the last `LOG_TAIL_BYTES` of what is added."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        self._kept += data[-LOG_TAIL_BYTES:]
        if len(self._kept) > LOG_TAIL_BYTES:
            del self._kept[:-LOG_TAIL_BYTES]

    def __str__(self) -> str:
        return self._kept.decode("utf-8", "replace")
