"""The driver's end of a connection in memory: its own lines and requests, without descriptors and a clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import Request, Requests
from decathlon_sandbox.lines import (
    DAMAGED,
    OVERLONG,
    Control,
    Lines,
    attached_line,
    ids_of_body,
    refused_line,
)

from decathlon_mcp.types import JsonObject


class DriverEnd:
    """Takes bytes from a server and has bytes for it, as `decathlon_sandbox.driver_end.Connection` does.

    `begin` starts the work of a request. `on_message` gets every message first, also a repeated one.
    """

    notification_bytes = 0

    def __init__(
        self,
        begin: Callable[[Request], object],
        on_message: Callable[[JsonObject], object] = lambda message: None,
    ) -> None:
        self.lines = Lines(wire.MAX_LINE_BYTES)
        self.generation = -1
        self.survive_seconds = 0
        self.attachments = 0
        """How often a server has attached."""
        self.requests = Requests(cast("Any", self), begin, lambda method, params: None)
        self.has_heard = False
        """Whether the bytes received last had a line of a server."""
        self._on_message = on_message
        self._outbox = bytearray()
        self._reported_loss = False

    def receive(self, data: bytes) -> None:
        self.has_heard = False
        for line in self.lines.receive(data):
            if isinstance(line, Control):
                self._on_control(line)
            elif line in (DAMAGED, OVERLONG):
                if not self._reported_loss:
                    self._reported_loss = True
                    self.send(b"lost")
            else:
                self.has_heard = True
                self._on_body(line)
        self.requests.begin_waiting()

    def send(self, body: bytes) -> None:
        """Send a body, which is lost if no server is attached."""
        if self.lines.reads:
            self._outbox += self.lines.frame(body)

    notify = send

    def data_to_send(self) -> bytes:
        data = bytes(self._outbox)
        self._outbox.clear()
        return data

    def stream_lost(self) -> None:
        self.lines.stream_lost()
        self._outbox.clear()

    def _on_control(self, line: Control) -> None:
        if line.kind != b"attach":
            return
        generation, _, survive_seconds = line.numbers[:3]
        if generation < self.generation:
            self._outbox += refused_line(line.nonce, self.generation)
            return
        self.generation, self.survive_seconds = generation, survive_seconds
        self.attachments += 1
        self.has_heard, self._reported_loss = True, False
        self.lines.begin_reading(line.nonce)
        self.lines.begin_writing(line.nonce)
        self._outbox[:] = attached_line(line.nonce, wire.VERSION)

    def _on_body(self, body: bytes) -> None:
        if (done := ids_of_body(body, b"done")) is not None:
            self.requests.forget(done)
        elif (pending := ids_of_body(body, b"pending")) is not None:
            self.requests.resume(pending)
        else:
            self._on_message(json.loads(body))
            self.requests.receive(body)
