"""The calls of one episode in its trajectory: their lines are written, and read again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import anyio.to_thread
import msgspec
from msgspec import Raw

from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.operations import Call, Outcome
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.errors import DecathlonError, DiskFullError, DriverError, LimitExceededError
from decathlon_mcp.grading.attempt import CallCounts, CallRecord
from decathlon_mcp.storage.trajectory import LoggedKey, RequestKeys, SentCalls, Trajectory
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json, as_object, read_object

log = logging.getLogger("decathlon.episodes")

NOT_KEPT_MESSAGE = "not kept: the log has reached its limit"
"""Message of the failure that stands for a reply that is too long."""
_FAILURES = {
    kind.code: kind for kind in (DecathlonError, *DecathlonError.__subclasses__()) if "code" in vars(kind)
}


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of an attempt, read one by one each time; those whose line cannot be read are skipped."""

    sent: SentCalls

    def __iter__(self) -> Iterator[CallRecord]:
        for lines in self.sent:
            if (call := read_object(lines.call)) is not None:
                yield CallRecord.of_lines(call, read_object(lines.reply))


class CallLog:
    """Writes the lines of an episode's calls. `first`: the highest number kept for another episode's calls.

    A call that was sent counts, and one without a reply counts as failed. What writes raises DiskFullError;
    then nothing has happened.
    """

    def __init__(self, trajectory: Trajectory, first: int = 0) -> None:
        self.trajectory = trajectory
        self._first = first

    @property
    def last(self) -> int:
        """Number of the newest call, from 1."""
        return max(self._first, self.trajectory.index.last)

    @property
    def counts(self) -> CallCounts:
        index = self.trajectory.index
        return CallCounts(index.sent, index.failed + index.sent - index.answered, len(index.tools))

    @property
    def calls(self) -> RecordedCalls:
        """The calls so far."""
        return RecordedCalls(self.trajectory.sent_calls())

    def add(self, call: Call, route: ToolRoute | None = None, request: int = 0) -> bool:
        """Write the line of a call that waits or, with its driver's request, of one that is about to be sent.

        False if it cannot be kept, nor sent.
        """
        # None if the client sent no arguments, so that a later server can send the same call.
        arguments = None if call.params.arguments is None else Raw(call.params.arguments)
        return self.trajectory.add(
            "accepted" if route is None else "call",
            **({} if route is None else {"server": route.server, "tool": route.tool, "request": request}),
            seq=call.seq,
            **({"replayed": True} if call.replayed else {}),
            name=call.name,
            arguments=arguments,
            **({"meta": call.params.meta} if call.params.meta else {}),
            **msgspec.to_builtins(call.keys),
            digest=call.digest,
            started_at=call.started_at,
        )

    def add_joined(self, call: Call, keys: RequestKeys) -> None:
        """Write that a further request gets the reply of this call."""
        with suppress(DiskFullError):
            self.trajectory.add("joined", seq=call.seq, digest=call.digest, **msgspec.to_builtins(keys))

    def add_reply(self, call: Call, outcome: Outcome) -> bool:
        """Write a call's reply or the error that it failed with; False if it cannot be kept.

        Instead of a reply that is too long, the fact is written, if there is room for that.
        """
        value: object
        if isinstance(outcome, DecathlonError):
            name, value = "failure", _failure(outcome)
        elif outcome.result is not None:
            name, value = "result", Raw(outcome.result)
        else:
            name, value = "error", outcome.error
        line = {
            "seq": call.seq,
            "failed": name != "result" or (isinstance(outcome, Reply) and outcome.is_error),
            "seconds": round(time.time() - call.started_at, 6),
        }
        if self.trajectory.add("reply", **line, **{name: value}):
            return True
        if not self.trajectory.add("reply", **line, failure=_failure(LimitExceededError(NOT_KEPT_MESSAGE))):
            self.trajectory.index.count_reply(call.seq, failed=bool(line["failed"]))
        return False

    def read_outcome(self, seq: int) -> Outcome | None:
        """The reply of a call that has ended; None if it was not kept. Blocks."""
        try:
            line = self.trajectory.line(self.trajectory.index.places(seq)[1])
        except OSError as error:
            log.warning("the reply to a call cannot be read", extra=fields(why=error.strerror))
            line = None
        if line is None:
            return None
        if (failure := as_object(line.get("failure"))) is not None:
            kind = _FAILURES.get(str(failure.get("code")), DriverError)
            return kind(str(failure.get("message")), **(as_object(failure.get("data")) or {}))
        if (result := as_object(line.get("result"))) is not None:
            return Reply.from_result(as_json(result))
        return Reply(None, as_object(line.get("error")) or {})

    async def read(self, *, starts_over: bool) -> tuple[Iterable[LoggedKey], list[Call]]:
        """The keys of a dead server's calls, and the calls that it left without a reply. Raises OSError.

        `starts_over`: the calls of another episode, which will be made again, are removed.
        """
        if starts_over and self._first:
            await anyio.to_thread.run_sync(self.trajectory.remove_calls, self._first)
        logged = await anyio.to_thread.run_sync(self.trajectory.read_calls)
        return logged.keys, [_unanswered_call(line) for line in logged.unanswered]


def _failure(error: DecathlonError) -> JsonObject:
    return {"code": error.code, "message": error.message, **({"data": error.data} if error.data else {})}


def _unanswered_call(line: JsonObject) -> Call:
    """A call of a server that died, from its last line in the trajectory."""
    request = line.get("request")
    return Call(
        seq=int(line["seq"]),
        name=str(line["name"]),
        params=CallParams.of(as_object(line.get("arguments")), as_object(line.get("meta"))),
        digest=str(line["digest"]),
        started_at=float(line["started_at"]),
        keys=msgspec.convert(line, RequestKeys),
        route=None if request is None else ToolRoute(str(line["server"]), str(line["tool"])),
        request=request,
    )
