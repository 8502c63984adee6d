"""By what clients know the calls of an episode, as a trajectory keeps it for the next server."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field

import msgspec

from decathlon_mcp.types import JsonObject

MAX_OPERATIONS = 10_000
"""Operations of one episode that are remembered, the newest; a client repeats its latest calls only."""


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """By what a client knows its request for a call: when it sends it again, these are the same.

    `operation`: an id that it has chosen. `session` and `client_request`: its MCP session and the request's
    JSON-RPC id there, which a client must not use for two requests.
    """

    operation: str | None = None
    session: str | None = None
    client_request: int | str | None = None

    @property
    def operations(self) -> list[str]:
        """Ids of the request, each of which is enough to find its call."""
        chosen = [] if self.operation is None else [self.operation]
        if self.session is None:
            return chosen
        return [*chosen, f"{self.session}:{request_id_text(self.client_request)}"]


def request_id_text(request_id: int | str | None) -> str:
    """A JSON-RPC id as JSON."""
    # The encoder takes ten times as long, and most ids are numbers.
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """An operation of a request, the digest of its call (see `episodes.operations`) and its number."""

    operation: str
    digest: str
    seq: int


@dataclass(slots=True)
class LoggedCalls:
    """What a server that starts later does with the calls in a trajectory.

    `unanswered`: the last lines of the calls without a reply, in the order of their numbers.
    """

    operations: deque[LoggedOperation] = field(
        default_factory=lambda: deque[LoggedOperation](maxlen=MAX_OPERATIONS)
    )
    unanswered: list[JsonObject] = field(default_factory=list[JsonObject])
