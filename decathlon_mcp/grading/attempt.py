"""The record of one attempt: what the agent did, as frozen values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from decathlon_client.client_values import SERVER_METRICS as SERVER_METRICS
from pydantic import BaseModel, ConfigDict, field_validator

from decathlon_mcp.sandboxes.base import Isolation, LimitName
from decathlon_mcp.storage.trajectory import SentCalls
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.types import JsonObject, Network, as_object, read_object

TOOL_METRICS = ("tool_calls(TOOL)", "failed_calls(TOOL)")
"""The metrics of one tool as lists of metrics show them."""
_TOOL_METRIC = re.compile(r"(tool_calls|failed_calls)\([^()]+\)")
"""Metrics of one tool, such as `tool_calls(shop__order)`; 0 for a tool that was not called."""
MAX_COUNTED_TOOLS = 500
TruncationCause: TypeAlias = Literal["calls", "client", "log", "time"]
"""What ended an attempt that its agent had not finished: the limit of tool calls, its client (whose own limit
was reached), the limit of its log or the server's disk, or the time limit of the episode."""
DETAIL_CHARACTERS = 4000
"""Longest text in a verdict that explains something to people."""
UNANSWERED = "the server has no reply of this call"
MAX_COUNT = 2**53 - 1
"""Largest count of turns, so that it is a number that a verdict may contain."""


def is_tool_metric(name: str) -> bool:
    """Whether the name is of a metric of one tool: how often it was called, or how often it failed."""
    return _TOOL_METRIC.fullmatch(name) is not None


class Facts(BaseModel):
    """What a verdict reports of the way to it, noted from the set-up on; each is a member of the verdict.

    A plug-in adds members of its own with `EpisodeRecords.note_facts`. The core carries them unseen, in the
    episode's row and to the verdict.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    suite_revision: str = ""
    """Commit, or a digest, of the task's and the suite's common files at the set-up, with a digest of local
    changes if there are any."""
    suite_changed: bool = False
    """The checkout changed between the server's start and the set-up, or between the set-up and the grading,
    so that some of the files used are of another revision."""
    suite_release: str | None = None
    """For Toolathlon: whether the checkout is from before Toolathlon-Verified, see `Suite.release`."""
    preprocess_failure: str = ""
    """How preprocess failed in a suite that ignores that: the exit code and the end of what it printed."""
    image_digest: str | None = None
    """Identifies the image of the agent's sandbox; None if there was none."""
    dense: bool = False
    """Memory of the agent's sandbox could be merged with other sandboxes."""
    coerced_arguments: bool = False
    """Arguments that were JSON in strings were replaced by what the schemas of their tools ask for."""
    prepared: bool = False
    """The agent's sandbox began as a copy of another sandbox that had been set up for this task."""

    @field_validator("preprocess_failure", mode="before")
    @classmethod
    def _shorten(cls, failure: Any) -> Any:
        return without_surrogates(failure[-DETAIL_CHARACTERS:]) if isinstance(failure, str) else failure

    def noted(self) -> JsonObject:
        """The members that were noted, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def with_(self, **facts: Any) -> Facts:
        """These facts with others noted. Raises ValueError for a member of this class that is not valid."""
        return Facts.model_validate({**self.noted(), **facts})


def without_surrogates(text: str) -> str:
    """The text with question marks for lone surrogates, which a sandbox may send and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a tool of the task."""

    seq: int
    """Number of the call in its episode."""
    server: str
    """The task's server that has the tool."""
    tool: str
    """The tool's name at its server."""
    name: str
    """The tool's name as the agent sent it."""
    arguments: JsonObject
    result: JsonObject | None
    """The raw MCP result, or {"error": ...}."""
    failed: bool
    started_at: float
    """When the call began, in seconds since the epoch."""
    seconds: float
    """Duration of the call; 0 for a call without a reply."""

    @classmethod
    def of_lines(cls, call: JsonObject, reply: JsonObject | None) -> CallRecord:
        """A call from its lines in the trajectory; without a reply it has failed."""
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
class RecordedCalls:
    """The calls of an attempt, read one by one each time; a call whose line cannot be read is skipped."""

    sent: SentCalls

    def __iter__(self) -> Iterator[CallRecord]:
        for lines in self.sent:
            if (call := read_object(lines.call)) is not None:
                yield CallRecord.of_lines(call, read_object(lines.reply))


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Counts: all calls, failed calls, and different tools."""

    calls: int = 0
    failed: int = 0
    tools: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One closed attempt at one task."""

    episode: str
    """The episode's public id."""
    task: str
    suite: str
    """Name of the suite; `task` and `suite` are spelled as clients spell them."""
    isolation: Isolation
    agent_network: Network
    grader_network: Network
    launch_time: datetime
    prompt: Prompt
    facts: Facts = field(default_factory=Facts)
    calls: Iterable[CallRecord] = ()
    """Read from the disk one by one, in the order in which they began, any number of times, in a thread."""
    call_counts: CallCounts = CallCounts()
    """Counts of all calls, also of calls that the disk does not have."""
    tools: Mapping[str, Sequence[JsonObject]] = field(default_factory=dict[str, Sequence[JsonObject]])
    """The tool definitions of each server, as the server sent them."""
    claimed: bool = False
    """The agent called `claim_done`."""
    truncated_by: TruncationCause | None = None
    """What ended the attempt before its agent did."""
    answer: str | None = None
    """The agent's words in its claim."""
    turns: int | None = None
    """None unless a controller reports it."""
    started_at: datetime | None = None
    """When the tools were ready."""
    claimed_at: datetime | None = None
    seconds: float | None = None
    """What was between the two, by a clock that nobody sets."""
    unlimited: tuple[LimitName, ...] = ()
    """Limits on sandboxes that the provider could not enforce."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """For the verdict alone; nothing that an evaluator reads has them."""

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

    def tool_counts(self) -> dict[str, float]:
        """`tool_calls(NAME)` and `failed_calls(NAME)` of the tools that were called. Blocks.

        At most `MAX_COUNTED_TOOLS` tools; `failed_calls` only of tools that failed.
        """
        counts = dict[str, float]()
        for call in self.calls:
            name = f"tool_calls({call.server}__{call.tool})"
            if name in counts or len(counts) < 2 * MAX_COUNTED_TOOLS:
                counts[name] = counts.get(name, 0.0) + 1
                if call.failed:
                    failed = f"failed_calls({call.server}__{call.tool})"
                    counts[failed] = counts.get(failed, 0.0) + 1
        return counts
