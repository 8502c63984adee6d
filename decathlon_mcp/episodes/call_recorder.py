"""Writes the calls of one episode to its trajectory, and reads them from there again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import anyio.to_thread
import msgspec
from msgspec import Raw

from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.operations import CallState, Outcome, RunningCall, failure_from_json, failure_json
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.errors import DecathlonError, DiskFullError, LimitExceededError
from decathlon_mcp.grading.attempt import CallCounts, CallRecord
from decathlon_mcp.storage.logged_calls import RequestKeys
from decathlon_mcp.storage.trajectory import SentCalls, Trajectory
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json, as_object

log = logging.getLogger("decathlon.episodes")

NOT_KEPT_MESSAGE = "not kept: the log has reached its limit"
"""Message of the failure that stands for a reply that is too long."""
_LOST_REPLY = failure_json(LimitExceededError(NOT_KEPT_MESSAGE))


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of an attempt, read from its trajectory one by one each time it is iterated."""

    sent: SentCalls

    def __iter__(self) -> Iterator[CallRecord]:
        return (CallRecord.of_lines(call, reply) for call, reply in self.sent.objects())


class CallRecorder:
    """Writes an episode's calls. `first`: the highest number that is kept for calls of another episode.

    A call that was sent counts, and one without a reply counts as failed.
    """

    def __init__(self, trajectory: Trajectory, first: int = 0) -> None:
        self._trajectory = trajectory
        self._first = first

    @property
    def last(self) -> int:
        """Number of the newest call, from 1."""
        return max(self._first, self._trajectory.index.last)

    @property
    def counts(self) -> CallCounts:
        index = self._trajectory.index
        return CallCounts(index.sent, index.failed + index.sent - index.answered, len(index.tools))

    @property
    def calls(self) -> RecordedCalls:
        """The calls so far."""
        return RecordedCalls(self._trajectory.sent_calls())

    def add_accepted(self, call: RunningCall) -> bool:
        """Write the line of a call that is not sent yet; False if it cannot be kept. Raises DiskFullError."""
        return self._trajectory.add("accepted", **_call_members(call))

    def add_call(self, call: RunningCall, route: ToolRoute, request: int) -> bool:
        """Write the line of a call that is about to be sent; False if it cannot be kept, nor sent.

        `request`: the id of the driver's request. Raises DiskFullError.
        """
        return self._trajectory.add(
            "call", server=route.server, tool=route.tool, request=request, **_call_members(call)
        )

    def add_joined(self, call: RunningCall, keys: RequestKeys) -> None:
        """Write that a further request gets the reply of this call."""
        with suppress(DiskFullError):
            self._trajectory.add("joined", seq=call.seq, digest=call.digest, **msgspec.to_builtins(keys))

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
        write = partial(self._trajectory.add, "reply", seq=call.seq, failed=failed, seconds=seconds)
        if write(**members):
            return True
        if not write(failure=_LOST_REPLY):
            self._trajectory.index.count_reply(call.seq, failed=failed)
        return False

    def copy(self, call: JsonObject, reply: JsonObject) -> bool:
        """Write a call from both lines that it has in another episode; False if they cannot be kept.

        Their members may be `msgspec.Raw`, except for `seq`, `server`, `tool` and `failed`. Requests by which
        clients know it stay the other episode's. Raises DiskFullError.
        """
        add = self._trajectory.add
        return add("call", **_without(call, *_OTHERS), replayed=True, request=0) and add(
            "reply", **_without(reply, *_OTHERS)
        )

    async def read_outcome(self, seq: int) -> Outcome | None:
        """The reply of a call that has ended; None if it was not kept."""
        return await anyio.to_thread.run_sync(self._read_outcome, seq)

    def _read_outcome(self, seq: int) -> Outcome | None:
        try:
            line = self._trajectory.line(self._trajectory.index.places(seq)[1])
        except OSError as error:
            log.warning("the reply to a call cannot be read", extra=fields(why=error.strerror))
            line = None
        if line is None:
            return None
        if (failure := as_object(line.get("failure"))) is not None:
            return failure_from_json(failure)
        if (result := as_object(line.get("result"))) is not None:
            return Reply.from_result(as_json(result))
        return Reply(None, as_object(line.get("error")) or {})

    def note_lost(self, call: RunningCall) -> None:
        """Count a call whose reply cannot be written any more."""
        self._trajectory.index.count_reply(call.seq, failed=True)


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
