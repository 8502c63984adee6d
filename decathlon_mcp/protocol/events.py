"""Responses that are streams of events, and the ids with which a client comes back for an answer.

A client whose stream breaks sends a GET with the id of the last event that it got. The id says which request
is meant, and that is all that is needed: the answer is made again from what the episode has on record (see
`Kind`), also by a server that was started meanwhile. Only the first event of a stream, which has no data, and
the answer have ids; notifications are not sent again.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from urllib.parse import quote, unquote

import msgspec
from starlette.types import Send

from decathlon_mcp.storage.logged_calls import request_id_text

RESUMABLE_SINCE = "2025-11-25"
"""The first protocol revision whose clients accept an event without data."""
MAX_REQUEST_ID_BYTES = 128
"""Longest JSON-RPC id of a request that can be resumed: the id comes back in a header."""
LAST_EVENT_KEY = "decathlon.last_event_id"
"""Key of the header `Last-Event-ID` in the ASGI scope."""
PING_SECONDS = 15.0
"""Time between two comments on a silent stream: clients and proxies close silent connections."""
PING = b": ping\r\n\r\n"

_EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
_EVENT_ID = re.compile(
    r"([0-9]{1,18})\.(0|last)\.([a-z]{1,8})\.([!-\-/-~]{1,512})(?:\.([0-9A-Za-z_-]{1,64}))?"
)


class Kind(StrEnum):
    """What a request asked for, and from what its answer is made again."""

    LIST = "list"
    """The tools: listed again."""
    CALL = "call"
    """A call of a task's tool: from the running call, or from the trajectory."""
    CLAIM = "claim"
    """From the claim in the episode's row."""
    EVALUATE = "evaluate"
    """Evaluated again, which gives the same verdict."""
    START = "start"
    """From the episode that the request has started."""
    OTHER = "other"
    """Cannot be made again: the client has to ask again."""


class EventId(msgspec.Struct, frozen=True):
    """The id of an event: GENERATION.NUMBER.KIND.REQUEST, at the lobby with .AGENT.

    `generation`: of the server that sent it. `is_answer`: whether it is the answer's (the number is `last`)
    or that of the first event (0). `request`: the request's JSON-RPC id. `agent`: the agent's id of the
    episode that a request at the lobby concerns.
    """

    generation: int
    kind: Kind
    request: int | str
    agent: str = ""
    is_answer: bool = False

    def __str__(self) -> str:
        text = request_id_text(self.request)
        # A dot is not escaped by `quote`, and separates the parts.
        request = text if text.isdigit() else quote(text, safe="").replace(".", "%2E")
        agent = f".{self.agent}" if self.agent else ""
        return f"{self.generation}.{'last' if self.is_answer else '0'}.{self.kind}.{request}{agent}"

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """None if it is not an id of ours."""
        if (match := _EVENT_ID.fullmatch(text)) is None:
            return None
        generation, number, kind, request, agent = match.groups()
        try:
            value = json.loads(unquote(request, errors="strict"))
            if isinstance(value, bool) or not isinstance(value, int | str):
                return None
            str(value).encode()  # no lone surrogates
            return cls(int(generation), Kind(kind), value, agent or "", number == "last")
        except ValueError:
            return None


def event_frame(message: bytes, event_id: EventId | None = None) -> bytes:
    """An event with a JSON-RPC message, which must be on one line."""
    prefix = b"" if event_id is None else b"id: %b\r\n" % str(event_id).encode()
    return b"%bevent: message\r\ndata: %b\r\n\r\n" % (prefix, message)


def first_event(event_id: EventId) -> bytes:
    """The first event of a stream that a client can come back to."""
    return b"id: %b\r\ndata: \r\n\r\n" % str(event_id).encode()


async def send_event_head(send: Send, session_id: str | None) -> None:
    """Send the head of a response that is a stream of events."""
    session = () if session_id is None else ((b"mcp-session-id", session_id.encode("ascii")),)
    headers = [*_EVENT_STREAM_HEADERS, *session]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_json(send: Send, status: int, message: bytes, session_id: str | None) -> None:
    """Send a whole response with a JSON body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(message))]
    if session_id is not None:
        headers.append((b"mcp-session-id", session_id.encode("ascii")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_body(send, message, more=False)


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
