"""The record of one attempt: what the agent did, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from decathlon_mcp.sandboxes.base import Isolation, LimitName
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.suites.release import Release
from decathlon_mcp.types import JsonObject, Network, as_object

SERVER_METRICS = ("calls", "failed_calls", "tools_used", "seconds", "turns", "success")
"""Names of the metrics that the server itself provides; `success` comes from the evaluator's exit code."""
TruncationCause: TypeAlias = Literal["calls", "client", "log", "time"]
"""What ended an attempt that its agent had not finished: the limit of tool calls, its client (whose own limit
was reached), the limit of its log or the server's disk, or the time limit of the episode."""
UNANSWERED = "the server has no reply of this call"
MAX_COUNT = 2**53 - 1
"""Largest count of turns, so that it is a number that a verdict may contain."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a tool of the task.

    `name` is the tool's name as the agent sent it, `result` the raw MCP result or {"error": ...}.
    `started_at` is in seconds since the epoch.
    """

    seq: int
    server: str
    tool: str
    name: str
    arguments: JsonObject
    result: JsonObject | None
    failed: bool
    started_at: float
    seconds: float

    @classmethod
    def of_lines(cls, call: JsonObject, reply: JsonObject | None) -> CallRecord:
        """A call from its lines in the trajectory; one without a reply has failed."""
        reply = {"failed": True, "seconds": 0.0, "error": UNANSWERED} if reply is None else reply
        result = reply.get("result")
        if result is None:
            failure = as_object(reply.get("failure"))
            result = {"error": failure.get("message") if failure else reply.get("error")}
        return cls(
            seq=int(call["seq"]),
            server=str(call["server"]),
            tool=str(call["tool"]),
            name=str(call["name"]),
            arguments=as_object(call.get("arguments")) or {},
            result=as_object(result),
            failed=bool(reply.get("failed")),
            started_at=float(call["started_at"]),
            seconds=float(reply.get("seconds") or 0),
        )


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Numbers of calls: all of them, those that failed, and different tools."""

    calls: int = 0
    failed: int = 0
    tools: int = 0


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Where an attempt branched from another episode, after that one's call `at`.

    `episode` is its public id. `differences`: how many replies to the calls until then differed when they
    were made again. `exact`: none was made again, because the sandbox is a copy of the other's after call
    `at`.
    """

    episode: str
    at: int
    differences: int = 0
    exact: bool = False

    def to_json(self) -> JsonObject:
        """The JSON form; `exact` only if it is true."""
        exact: JsonObject = {"exact": True} if self.exact else {}
        return {"episode": self.episode, "at": self.at, "differences": self.differences, **exact}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One closed attempt at one task.

    `episode` is the public id. `task` and `suite` are names as clients spell them. `tools` are the tool
    definitions of each server, as the server sent them. `calls` can be iterated any number of times, in a
    worker thread: it reads them from disk one by one, in the order in which they began. `call_counts`
    includes those that the disk does not have. `turns` is None unless a controller reports it. `started_at`
    is the time when the tools were ready, `claimed_at` the time when they were closed, `seconds` what was in
    between, by a clock that nobody sets. `claimed`: the agent
    called `claim_done`. `truncated_by`: what ended the attempt before its agent did. `suite_revision` is that
    of the files at the set-up; `suite_changed`: not all files that were used are of that revision.
    `suite_release`: of Toolathlon, None for other suites. `preprocess_failure`: how preprocess failed, if the
    suite ignores that. `image_digest`: the agent's image, None without one. `dense`: memory of the agent's
    sandbox could be merged with that of others. `coerced_arguments`, `prepared`: see `Verdict`.
    `unlimited`: limits on sandboxes that the provider could not enforce. `labels`: for the verdict alone;
    nothing that an evaluator reads has them. `branch`: None for an attempt that was played whole.
    """

    episode: str
    task: str
    suite: str
    suite_revision: str
    isolation: Isolation
    agent_network: Network
    grader_network: Network
    launch_time: datetime
    prompt: Prompt
    calls: Iterable[CallRecord] = ()
    call_counts: CallCounts = CallCounts()
    tools: Mapping[str, Sequence[JsonObject]] = field(default_factory=dict[str, Sequence[JsonObject]])
    claimed: bool = False
    truncated_by: TruncationCause | None = None
    answer: str | None = None
    turns: int | None = None
    started_at: datetime | None = None
    claimed_at: datetime | None = None
    seconds: float | None = None
    image_digest: str | None = None
    unlimited: tuple[LimitName, ...] = ()
    suite_changed: bool = False
    suite_release: Release | None = None
    dense: bool = False
    coerced_arguments: bool = False
    prepared: bool = False
    preprocess_failure: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    branch: BranchPoint | None = None

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the attempt."""
        return self.truncated_by is not None

    @property
    def counts(self) -> dict[str, float]:
        """The metrics of `SERVER_METRICS` that are known before the evaluation; `claim_done` is no call."""
        counts = {
            "calls": float(self.call_counts.calls),
            "failed_calls": float(self.call_counts.failed),
            "tools_used": float(self.call_counts.tools),
        }
        if self.seconds is not None:
            counts["seconds"] = self.seconds
        if self.turns is not None:
            counts["turns"] = float(min(self.turns, MAX_COUNT))
        return counts
