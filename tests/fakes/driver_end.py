"""The driver's end of a connection without a driver: lines, kept responses and used ids, in memory."""

from __future__ import annotations

import json
from typing import Any

from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import UsedIds
from decathlon_sandbox.lines import (
    DAMAGED,
    OVERLONG,
    Control,
    Lines,
    attached_line,
    body_of_ids,
    ids_of_body,
    refused_line,
)
from decathlon_sandbox.strict_json import as_object


class DriverEnd:
    """Takes bytes from a server and has bytes for it. A copy of it is the end of a copied sandbox."""

    def __init__(self) -> None:
        self.lines = Lines(wire.MAX_LINE_BYTES)
        self.generation = -1
        self.survive_seconds = 0
        self.attachments = 0
        """How often a server has attached."""
        self.pending: list[int] = []
        """The requests that the last attachment named."""
        self.responses: dict[int, bytes] = {}
        """The responses that the server is not done with."""
        self.used_ids = UsedIds()
        self.has_heard = False
        """Whether the bytes received last had a line of a server."""
        self._outbox = bytearray()
        self._reported_loss = False

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """The messages in these bytes, but for requests that were used before."""
        messages: list[dict[str, Any]] = []
        self.has_heard = False
        for line in self.lines.receive(data):
            if isinstance(line, Control):
                self._on_control(line)
            elif line in (DAMAGED, OVERLONG):
                if not self._reported_loss:
                    self._reported_loss = True
                    self._outbox += self.lines.frame(b"lost")
            else:
                self.has_heard = True
                self._on_body(line, messages)
        return messages

    def send(self, payload: bytes) -> None:
        """Send a message. A response is kept; a notification is lost if no server is attached."""
        request_id = _id_of(payload)
        if request_id is not None:
            self.responses[request_id] = payload
        if self.lines.reads:
            self._outbox += self.lines.frame(payload)

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

    def _on_body(self, body: bytes, messages: list[dict[str, Any]]) -> None:
        if (done := ids_of_body(body, b"done")) is not None:
            for request_id in done:
                self.responses.pop(request_id, None)
        elif (pending := ids_of_body(body, b"pending")) is not None:
            self.pending = pending
            unknown = [number for number in pending if number not in self.used_ids]
            self._outbox += self.lines.frame(body_of_ids(b"unknown", unknown))
            self.responses = {number: kept for number, kept in self.responses.items() if number in pending}
            for kept in self.responses.values():
                self._outbox += self.lines.frame(kept)
        else:
            message = json.loads(body)
            if "id" not in message or self.used_ids.add(message["id"]):
                messages.append(message)
            elif (kept := self.responses.get(message["id"])) is not None:
                self._outbox += self.lines.frame(kept)


def _id_of(payload: bytes) -> int | None:
    """The id of a response, None for any other message, and for what is none."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    number = (as_object(message) or {}).get("id")
    return number if type(number) is int else None
