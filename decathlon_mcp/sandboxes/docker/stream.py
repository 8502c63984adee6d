"""The attached stream of a container without a terminal: stdout and stderr in frames on one connection.

A frame is one byte (1 stdout, 2 stderr), three of zero, four of length, big-endian; frames do not respect
lines (Docker Engine API, "Attach to a container").
"""

from __future__ import annotations

import anyio
from anyio.abc import ByteStream

from decathlon_mcp.sandboxes.log_tail import LogTail
from decathlon_mcp.sandboxes.socket_stream import SocketStream

_HEADER_BYTES = 8
_CHUNK_BYTES = 1 << 17
_STDERR = 2


class AttachedStream(ByteStream):
    """stdin and stdout of a container's first process; what comes on stderr goes to `tail`."""

    def __init__(self, line: SocketStream) -> None:
        self.line = line
        self.tail = LogTail()
        self._ready = b""
        self._header = b""
        self._kind = 0
        self._left = 0
        self._reading = anyio.ResourceGuard("reading from")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        with self._reading:
            while not self._ready:
                self._ready = self._taken_apart(await self.line.receive(_CHUNK_BYTES))
            data, self._ready = self._ready[:max_bytes], self._ready[max_bytes:]
            return data

    async def send(self, item: bytes) -> None:
        await self.line.send(item)

    async def send_eof(self) -> None:
        await self.line.send_eof()

    async def aclose(self) -> None:
        await self.line.aclose()

    def _taken_apart(self, chunk: bytes) -> bytes:
        """What of a chunk is stdout's; frames may begin and end anywhere in it."""
        out: list[bytes] = []
        at = 0
        while at < len(chunk):
            if not self._left:
                missing = _HEADER_BYTES - len(self._header)
                self._header += chunk[at : at + missing]
                at += missing
                if len(self._header) == _HEADER_BYTES:
                    self._kind, self._left = self._header[0], int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            content = chunk[at : at + self._left]
            at += len(content)
            self._left -= len(content)
            if self._kind == _STDERR:
                self.tail.add(content)
            else:
                out.append(content)
        return b"".join(out)
