"""The server's end of a connection without a server: lines in memory."""

from __future__ import annotations

from collections.abc import Collection

from decathlon_sandbox import wire
from decathlon_sandbox.lines import Control, Lines, attach_line, body_of_ids, ids_of_body


class ServerEnd:
    """Takes bytes from a driver and has bytes for it."""

    def __init__(self, *, generation: int, survive_seconds: int = 0) -> None:
        self.lines = Lines(wire.MAX_LINE_BYTES + wire.RESPONSE_MARGIN_BYTES)
        self.generation = generation
        self.survive_seconds = survive_seconds
        self.peer_version: int | None = None
        """The driver's wire version, once it has been attached."""
        self.refused_for: int | None = None
        """The generation of the server process to which the driver belongs now, after it has refused."""
        self.unknown: list[int] | None = None
        """The requests that the driver has never had, as it answered the last attachment."""
        self.damaged: list[bytes] = []
        """What was received and is no line, and the driver's reports of lost ones."""
        self._nonce = b""
        self._outbox = bytearray()

    @property
    def attached(self) -> bool:
        return self.lines.reads

    def attach(self, nonce: str, pending: Collection[int] = ()) -> None:
        """Attach to a stream; `pending` are the requests that are not answered."""
        self._nonce = nonce.encode()
        self.unknown = None
        self.lines.stop_reading()
        self.lines.begin_writing(self._nonce)
        self._outbox[:] = attach_line(self._nonce, self.generation, wire.VERSION, self.survive_seconds)
        self._outbox += self.lines.frame(body_of_ids(b"pending", pending))

    def send(self, payload: bytes) -> None:
        self._outbox += self.lines.frame(payload)

    def done(self, *ids: int) -> None:
        """The responses to these requests are not needed any more."""
        self._outbox += self.lines.frame(body_of_ids(b"done", ids))

    def data_to_send(self) -> bytes:
        data = bytes(self._outbox)
        self._outbox.clear()
        return data

    def receive(self, data: bytes) -> list[bytes]:
        """The messages in these bytes."""
        messages: list[bytes] = []
        for line in self.lines.receive(data):
            if isinstance(line, Control):
                self._on_control(line)
            elif (unknown := ids_of_body(line, b"unknown")) is not None:
                self.unknown = unknown
            elif line.startswith(b"{"):
                messages.append(line)
            else:
                self.damaged.append(line)
        return messages

    def stream_lost(self) -> None:
        self.lines.stream_lost()
        self._outbox.clear()

    def _on_control(self, line: Control) -> None:
        if line.nonce != self._nonce:
            return
        if line.kind == b"attached":
            self.peer_version = line.numbers[0]
            self.lines.begin_reading(self._nonce)
        elif line.kind == b"refused":
            self.refused_for = line.numbers[0]
