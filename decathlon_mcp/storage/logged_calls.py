"""By what clients know the calls of an episode, as a trajectory keeps it for the next server."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field

import msgspec

from decathlon_mcp.types import JsonObject

MAX_KEYS = 10_000
"""Keys of one episode that are remembered, the newest; a client repeats its latest calls only."""


class RequestKeys(msgspec.Struct, frozen=True, omit_defaults=True):
    """By what the client of a request comes back to its call.

    `operation`: an id that the client has chosen. `session`: its MCP session. `event_id`: the number that
    this server has given the events of the response, `GENERATION.NUMBER`; None if the client cannot come back
    with it. The request's JSON-RPC id is no key: clients use one again.
    """

    operation: str | None = None
    session: str | None = None
    event_id: str | None = None

    @property
    def texts(self) -> list[str]:
        """The keys, each of which is enough to find the call. An event id counts in its own session only."""
        chosen = [] if self.operation is None else [self.operation]
        if self.session is None or self.event_id is None:
            return chosen
        return [*chosen, f"{self.session}:{self.event_id}"]


def request_id_text(request_id: int | str | None) -> str:
    """A JSON-RPC id as JSON."""
    # The encoder takes ten times as long, and most ids are numbers.
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


@dataclass(frozen=True, slots=True)
class LoggedKey:
    """A key of a request, the digest of its call (see `episodes.operations`) and its number."""

    key: str
    digest: str
    seq: int


@dataclass(slots=True)
class LoggedCalls:
    """What a server that starts later does with the calls in a trajectory.

    `unanswered`: the last lines of the calls without a reply, in the order of their numbers.
    """

    keys: deque[LoggedKey] = field(default_factory=lambda: deque[LoggedKey](maxlen=MAX_KEYS))
    unanswered: list[JsonObject] = field(default_factory=list[JsonObject])
