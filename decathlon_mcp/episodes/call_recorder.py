"""Writes the calls of one episode to its trajectory, counts them, and reads them from there again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import anyio.to_thread
import msgspec
from msgspec import Raw

from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.operations import CallState, Outcome, RunningCall, failure_from_json, failure_json
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.errors import DecathlonError, LimitExceededError
from decathlon_mcp.grading.attempt import CallCounts, CallRecord
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.logged_calls import (
    NOT_KEPT,
    NOT_KEPT_MESSAGE,
    CallPositions,
    LoggedCalls,
    RequestKeys,
)
from decathlon_mcp.storage.trajectory import TrajectoryCalls
from decathlon_mcp.types import JsonObject, as_json, as_object

_LOST_REPLY = failure_json(LimitExceededError(NOT_KEPT_MESSAGE))


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of an attempt, read from its trajectory one by one each time it is iterated."""

    lines: TrajectoryCalls

    def __iter__(self) -> Iterator[CallRecord]:
        return map(CallRecord.from_journal, self.lines)


class CallRecorder:
    """Writes and counts an episode's calls. `last`: number of the newest call, from 1; at first `first`.

    A call that was sent counts, and one without a reply counts as failed.
    """

    def __init__(self, journal: Journal, first: int = 0) -> None:
        self.last = first
        self.sent = 0
        """Number of calls that were sent."""
        self._journal = journal
        self._positions = CallPositions()
        self.answered = 0
        """Number of those that have their reply."""
        self._failed = 0
        self._routes: set[ToolRoute] = set()

    @property
    def counts(self) -> CallCounts:
        return CallCounts(self.sent, self._failed + self.sent - self.answered, len(self._routes))

    @property
    def calls(self) -> RecordedCalls:
        """The calls so far."""
        return RecordedCalls(self._journal.calls_at(self._positions.snapshot()))

    def add_accepted(self, call: RunningCall) -> bool:
        """Write the line of a call that is not sent yet; False if it cannot be kept. Raises DiskFullError."""
        return self._journal.add_accepted(**_call_members(call))

    def add_call(self, call: RunningCall, route: ToolRoute, request: int) -> bool:
        """Write the line of a call that is about to be sent; False if it cannot be kept, nor sent.

        `request`: the id of the driver's request. Raises DiskFullError.
        """
        position = self._journal.add_call(
            server=route.server, tool=route.tool, request=request, **_call_members(call)
        )
        if position == NOT_KEPT:
            return False
        self.sent += 1
        self._routes.add(route)
        self._positions.set_call(call.seq, position)
        return True

    def add_joined(self, call: RunningCall, keys: RequestKeys) -> None:
        """Write that a further request gets the reply of this call."""
        self._journal.add_joined(seq=call.seq, digest=call.digest, **msgspec.to_builtins(keys))

    def add_reply(self, call: RunningCall, outcome: Outcome) -> bool:
        """Write a call's reply or the error that it failed with; False if it cannot be kept.

        Instead of a reply that is too long, the fact is written, if there is room for that. Raises
        DiskFullError; then nothing has happened.
        """
        members: JsonObject
        if isinstance(outcome, DecathlonError):
            failed, members = True, {"failure": failure_json(outcome)}
        elif outcome.result is not None:
            failed, members = outcome.is_error, {"result": Raw(outcome.result)}
        else:
            failed, members = True, {"error": outcome.error}
        seconds = round(time.time() - call.started_at, 6)
        write = partial(self._journal.add_reply, seq=call.seq, failed=failed, seconds=seconds)
        position = write(**members)
        is_kept = position != NOT_KEPT
        if not is_kept:
            position = write(failure=_LOST_REPLY)
        if self._positions.has_call(call.seq):
            self.answered += 1
            self._failed += failed
        self._positions.set_reply(call.seq, position)
        return is_kept

    def copy(self, call: JsonObject, reply: JsonObject) -> bool:
        """Write a call from both lines that it has in another episode; False if they cannot be kept.

        Raises DiskFullError.

        Their members may be `msgspec.Raw`, except for `seq`, `server`, `tool` and `failed`. Requests by which
        clients know it stay the other episode's.
        """
        seq, route = int(call["seq"]), ToolRoute(str(call["server"]), str(call["tool"]))
        position = self._journal.add_call(**_without(call, *_OTHERS), replayed=True, request=0)
        if position == NOT_KEPT:
            return False
        self.sent += 1
        self._routes.add(route)
        self._positions.set_call(seq, position)
        position = self._journal.add_reply(**_without(reply, *_OTHERS))
        if position == NOT_KEPT:
            return False
        self.answered += 1
        self._failed += bool(reply["failed"])
        self._positions.set_reply(seq, position)
        return True

    async def read_outcome(self, seq: int) -> Outcome | None:
        """The first reply of a call that has ended; None if it was not kept."""
        return await anyio.to_thread.run_sync(self._read_outcome, self._positions.reply(seq))

    def _read_outcome(self, position: int) -> Outcome | None:
        if (line := self._journal.line_at(position)) is None:
            return None
        if (failure := as_object(line.get("failure"))) is not None:
            return failure_from_json(failure)
        if (result := as_object(line.get("result"))) is not None:
            return Reply.from_result(as_json(result))
        return Reply(None, as_object(line.get("error")) or {})

    def restore(self, logged: LoggedCalls) -> None:
        """Continue the record of a server that died."""
        self.last = max(self.last, logged.last)
        self.sent = logged.calls
        self._positions = logged.positions
        self.answered = logged.calls - sum("request" in line for line in logged.unanswered)
        self._failed = logged.failed
        self._routes = {ToolRoute(server, tool) for server, tool in logged.tools}

    def note_lost(self, call: RunningCall) -> None:
        """Count a call whose reply cannot be written any more."""
        if self._positions.has_call(call.seq):
            self.answered += 1
            self._failed += 1

    def forget(self) -> None:
        """Free the positions of an episode that is over."""
        self._positions = CallPositions()


_OTHERS = ("event", "time", "replayed", "request", *RequestKeys.__struct_fields__)
"""Members of a call's lines that are not those of its copy."""


def _without(line: JsonObject, *names: str) -> JsonObject:
    return {name: value for name, value in line.items() if name not in names}


def _call_members(call: RunningCall) -> JsonObject:
    arguments, meta = call.params.arguments, call.params.meta
    return {
        "seq": call.seq,
        **({"replayed": True} if call.replayed else {}),
        "name": call.name,
        # None if the client sent no arguments, so that a later server can send the same call.
        "arguments": None if arguments is None else Raw(arguments),
        **({"meta": meta} if meta else {}),
        **msgspec.to_builtins(call.keys),
        "digest": call.digest,
        "started_at": call.started_at,
    }


def unanswered_call(event: JsonObject) -> RunningCall:
    """A call of a server that died, from its last line in the trajectory."""
    name = str(event["name"])
    params = CallParams.of(as_object(event.get("arguments")), as_object(event.get("meta")))
    request = event.get("request")
    return RunningCall(
        seq=int(event["seq"]),
        name=name,
        params=params,
        digest=str(event["digest"]),
        started_at=float(event["started_at"]),
        keys=msgspec.convert(event, RequestKeys),
        route=None if request is None else ToolRoute(str(event["server"]), str(event["tool"])),
        request=request,
        state=CallState.WAITING if request is None else CallState.RESTORED,
    )
