"""Words that every room uses: what an episode's life is made of, and JSON as it comes from strangers."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal, TypeAlias, cast

from pydantic_core import to_json

JsonObject: TypeAlias = dict[str, Any]
Names: TypeAlias = Literal["decathlon", "toolathlon", "raw"]
Language: TypeAlias = Literal["en", "cn"]
Network: TypeAlias = Literal["none", "outbound"]


def as_object(value: object) -> JsonObject | None:
    """`value` where it is a JSON object, else None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_json(value: object) -> bytes:
    """A JSON value as compact UTF-8; half surrogate pairs, which that cannot hold, are escaped."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value).encode()


class Phase(StrEnum):
    """Where an episode stands in its life (`MOVES` says what may follow what)."""

    QUEUED = "queued"
    OPENING = "opening"
    READY = "ready"
    CLAIMED = "claimed"
    SCORED = "scored"
    ENDED = "ended"


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.OPENING, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.READY: frozenset({Phase.CLAIMED, Phase.ENDED}),
    Phase.CLAIMED: frozenset({Phase.SCORED, Phase.ENDED}),
    Phase.SCORED: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Ending(StrEnum):
    """Why an episode ended."""

    CLOSED = "closed by its client"
    SCORED = "scored"
    LEASE_EXPIRED = "its lease expired: no request for too long"
    TIME_OVER = "its time is over"
    SANDBOX_LOST = "its sandbox was lost"
    SET_UP_FAILED = "its set-up failed"
    NO_VERDICT = "its evaluation gave no verdict"
    SERVER_STOPPED = "the server shut down"
    FAULT = "a fault of the server"
