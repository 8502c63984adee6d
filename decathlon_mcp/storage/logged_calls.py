"""The calls in a trajectory: where their lines are, and what a server that starts later reads of them.

A call's number, `seq`, counts from 1. Its line `call` is written before it is sent, its line `reply` when the
reply is there, with one of `result` (of the tool), `error` (a JSON-RPC error of the task's server) and
`failure` (an error of this server). A call that has to wait before it is sent, for the set-up or for its
server's start, has a line `accepted` until then: if it is never sent, it counts for nothing. A line `joined`
has the keys of another request that gets the same reply.

All other lines are passed over: `start`, the first, with what was fixed at the start; `ready`, with the
prompt the digest of the tools; `preprocess_failed`, `difference`, `claim` and `end`. A call that was made
again, of the episode that this one branches from, has `"replayed": true` in its lines `accepted` and `call`.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from decathlon_mcp.types import JsonObject, as_object

NOTE_PREFIX = b'{"event":"note",'
"""The beginning of the line of a note, which has nothing about a call."""
NOT_KEPT = -1
"""Position of a line that the trajectory does not have."""
MAX_KEYS = 10_000
"""Keys of one episode that are remembered, the newest; a client repeats its latest calls only."""
NOT_KEPT_MESSAGE = "not kept: the log has reached its limit"
"""Message of the failure that stands for a reply that is too long."""
UNANSWERED = "the server has no reply of this call"


class Positions(NamedTuple):
    """Where the two lines of a call begin, in bytes."""

    call: int
    reply: int


class CallPositions:
    """Where the lines of an episode's calls are in its trajectory, by the calls' numbers."""

    def __init__(self) -> None:
        # 16 bytes a call: an episode may have millions.
        self._calls = array("q")
        self._replies = array("q")

    def set_call(self, seq: int, position: int) -> None:
        self._fill(seq)
        self._calls[seq - 1] = position

    def set_reply(self, seq: int, position: int) -> None:
        self._fill(seq)
        self._replies[seq - 1] = position

    def reply(self, seq: int) -> int:
        """Position of a call's reply; NOT_KEPT if there is none."""
        return self._replies[seq - 1] if seq <= len(self._replies) else NOT_KEPT

    def has_call(self, seq: int) -> bool:
        """Whether a call was sent."""
        return seq <= len(self._calls) and self._calls[seq - 1] != NOT_KEPT

    def snapshot(self) -> CallPositions:
        """The positions known so far; later changes do not affect them."""
        copy = CallPositions()
        copy._calls, copy._replies = self._calls[:], self._replies[:]
        return copy

    def __iter__(self) -> Iterator[Positions]:
        return map(Positions, self._calls, self._replies)

    def _fill(self, seq: int) -> None:
        missing = [NOT_KEPT] * (seq - len(self._calls))
        self._calls.extend(missing)
        self._replies.extend(missing)


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
    """What a trajectory has about its calls.

    `last`: the highest number. `calls`, `failed`: those that were sent, and those of them whose reply is a
    failure. `tools`: pairs of server and tool. `unanswered`: the last lines of the calls without a reply, in
    the order of their numbers. `damage`: how the trajectory differs from what was written; None if it does
    not, as far as is known. `notes`, `notes_bytes`: number and size of the lines `note`.
    """

    positions: CallPositions = field(default_factory=CallPositions)
    last: int = 0
    calls: int = 0
    failed: int = 0
    notes: int = 0
    notes_bytes: int = 0
    tools: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    keys: deque[LoggedKey] = field(default_factory=lambda: deque[LoggedKey](maxlen=MAX_KEYS))
    unanswered: list[JsonObject] = field(default_factory=list[JsonObject])
    damage: str | None = None


class _Line(msgspec.Struct, frozen=True):
    """The members of a line that are needed; all others, which may be megabytes, are skipped."""

    event: str = ""
    seq: int = 0
    server: str = ""
    tool: str = ""
    operation: str | None = None
    session: str | None = None
    event_id: str | None = None
    digest: str | None = None
    failed: bool = False

    @property
    def keys(self) -> list[str]:
        return RequestKeys(self.operation, self.session, self.event_id).texts


_decode_line = msgspec.json.Decoder(_Line).decode


def read_calls(lines: Iterable[bytes]) -> LoggedCalls:
    """Read a trajectory, line by line. Lines that cannot be read are skipped."""
    logged = LoggedCalls()
    unanswered: dict[int, bytes] = {}
    accepted: set[int] = set()
    position = 0
    for data in lines:
        if data.startswith(NOTE_PREFIX):
            logged.notes += 1
            logged.notes_bytes += len(data)
        elif (line := _read(data)) is not None and line.seq > 0:
            logged.last = max(logged.last, line.seq)
            if line.event == "call":
                logged.calls += 1
                logged.tools.add((line.server, line.tool))
                logged.positions.set_call(line.seq, position)
            elif line.event == "reply":
                unanswered.pop(line.seq, None)
                logged.failed += line.failed and logged.positions.has_call(line.seq)
                logged.positions.set_reply(line.seq, position)
            if line.event in ("accepted", "call"):
                unanswered[line.seq] = data
            # The line `call` of one that was accepted before has the same.
            if line.digest is not None and not (line.event == "call" and line.seq in accepted):
                logged.keys += [LoggedKey(key, line.digest, line.seq) for key in line.keys]
            if line.event == "accepted":
                accepted.add(line.seq)
        position += len(data)
    last_lines = (unanswered[seq] for seq in sorted(unanswered))
    logged.unanswered = [call for data in last_lines if (call := as_object(json.loads(data)))]
    return logged


def seq_of(line: bytes) -> int:
    """The number of the call that a line is about; 0 for any other line, and one that cannot be read."""
    known = None if line.startswith(NOTE_PREFIX) else _read(line)
    return 0 if known is None else known.seq


def merged(call: JsonObject, reply: JsonObject | None) -> JsonObject:
    """Both lines of a call as one object, with `failed`, `seconds` and `result`.

    `result` is the tool's result, or {"error": ...} with the message of this server or the server's error.
    """
    if reply is None:
        return {"failed": True, "seconds": 0.0, "result": {"error": UNANSWERED}, **call}
    result = reply.get("result")
    if result is None:
        failure = as_object(reply.get("failure"))
        result = {"error": failure.get("message") if failure else reply.get("error")}
    return {**call, "failed": reply.get("failed"), "seconds": reply.get("seconds"), "result": result}


def _read(data: bytes) -> _Line | None:
    try:
        return _decode_line(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        # Lone surrogates, which Python's decoder takes.
        return msgspec.convert(json.loads(data), _Line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
