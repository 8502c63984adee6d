"""Values that `EpisodeHistory` returns. None has a handle: `public_id` names an episode, without access.

An episode is *live* until it has ended or has a verdict, and finished then: *scored* if it has a reward, and
*lost* if not.
Numbers of attempts do not count episodes that replay or branch from others, unless they were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Self, TypeAlias, TypeVar

from decathlon_mcp.types import JsonObject

T = TypeVar("T")
Column: TypeAlias = Literal["started", "result", "task", "run", "calls", "took"]
ReplyKind: TypeAlias = Literal["result", "error", "failure"]
RunColumn: TypeAlias = Literal["newest", "run", "success", "reward", "episodes", "lost", "tasks"]


@dataclass(frozen=True, slots=True)
class Order:
    """The order of episodes. Among equals the newest is first, or last if not `descending`.

    `result`, descending: lost episodes, then failures from the lowest reward, live episodes, and successes.
    What has no run, no calls or no end yet is the least.
    """

    column: Column = "started"
    descending: bool = True


FAILURES_FIRST = Order("result")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Part of a list. `cursor`: what gives the next page; None if this is the last."""

    items: tuple[T, ...]
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """The beginning of a text. `size_bytes` is the length of the whole, in UTF-8.

    The text of a JSON value is as it was written, so that one that is `truncated` is no JSON.
    """

    raw: str
    truncated: bool
    size_bytes: int

    @classmethod
    def whole(cls, text: str) -> Self:
        return cls(text, truncated=False, size_bytes=len(text.encode("utf-8", "surrogatepass")))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeQuery:
    """Conditions on episodes; None is no condition."""

    run: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that an episode must have, with these values."""
    suite: str | None = None
    task: str | None = None
    """The task's id as clients spell it."""
    live: bool | None = None
    failed: bool | None = None
    """It has finished without success, or is lost."""
    lost: bool | None = None
    """It has finished without a reward."""
    stray: bool | None = None
    """It has no run, and ended before it was claimed."""
    owner: str | None = None
    """Name of its token."""
    order: Order = Order()
    with_branches: bool = False
    """Also episodes that replay or branch from others."""
    branch_of: str | None = None


@dataclass(frozen=True, slots=True)
class BranchOrigin:
    """Where a branch began: as the `episode` stood after its call `at`.

    `differences`: how many replies differed when calls were made again. `exact`: none was made again, because
    its sandbox is a copy. Both are None until the branch is ready.
    """

    episode: str
    at: int
    differences: int | None
    exact: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """One episode, from its row. Times in Unix seconds."""

    public_id: str
    suite: str
    task: str
    phase: str
    owner: str | None
    """Name of its token."""
    labels: Mapping[str, str]
    started_at: float
    ended_at: float | None
    ending: str | None
    calls: int | None
    """Known from the claim on; None before, and if its server died."""
    turns: int | None
    """With `status`, `success` and `reward`, from its verdict."""
    status: str | None
    success: bool | None
    reward: float | None
    reason: str | None
    cause: str | None
    """The error behind its end, if there was one."""
    is_live: bool
    is_derived: bool
    """Whether it replays or branches from another episode."""
    pinned: bool
    has_files: bool
    origin: BranchOrigin | None
    server: str
    """Name of the server that runs it, or ran it."""

    @property
    def run(self) -> str | None:
        return self.labels.get("run")

    @property
    def is_lost(self) -> bool:
        return not self.is_live and self.reward is None


@dataclass(slots=True)
class TreeNode:
    """An episode in a tree of branches. `episode`: None if it is not there, or belongs to somebody else.

    `branches`: first with branches of their own, then the others; of each the best first. `hidden`: how many
    more.
    """

    public_id: str
    episode: EpisodeSummary | None
    branches: list[TreeNode] = field(default_factory=list["TreeNode"])
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeTree:
    """What an episode branches from, and what branches from that, as far as `history.trees` reads it.

    `episodes`: all that are in it. `is_cut`: others are not. A root that is a branch was cut off there.
    """

    root: TreeNode
    episodes: tuple[EpisodeSummary, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Attempts, counted. Of `finished` attempts, `scored` have a reward and `lost` have none.

    `successes`: scored attempts that succeeded, as their evaluator decided, whatever their reward is.
    """

    live: int
    finished: int
    scored: int
    successes: int

    @property
    def episodes(self) -> int:
        return self.live + self.finished

    @property
    def lost(self) -> int:
        return self.finished - self.scored

    @property
    def success_rate(self) -> float | None:
        """Successes over all finished attempts, also lost attempts; None if none has finished."""
        return self.successes / self.finished if self.finished else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run: the episodes with this label `run`. Times in Unix seconds."""

    name: str
    counts: Counts
    tasks: int
    mean_reward: float | None
    """Over the attempts with a reward."""
    started_at: float
    """When its first episode started."""
    newest_at: float
    """When its newest episode started."""
    pinned: bool
    """Whether every episode is kept."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` values, with its standard error; the error is None below two values."""

    mean: float
    standard_error: float | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The attempts of one run at one task. Means are over the attempts that have the number."""

    suite: str
    task: str
    counts: Counts
    pass_1: Estimate | None
    """The share of finished attempts that succeeded."""
    mean_reward: float | None
    mean_turns: float | None
    mean_calls: float | None
    pass_at: Mapping[int, float]
    """By k: the probability that at least one of k attempts succeeds. Only k up to the finished attempts."""
    pass_all: Mapping[int, float]
    """By k: the probability that all of k attempts succeed, which others write pass^k."""


@dataclass(frozen=True, slots=True)
class PassAtK:
    """pass@k and pass^k of a run: means over its tasks with at least k finished attempts.

    `too_few`: the tasks with fewer, which are not in the means; `SUITE:TASK` if the run has several suites.
    """

    k: int
    pass_at: Estimate | None
    pass_all: Estimate | None
    too_few: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The attempts of one step of a run: `at` is the label `step`, or a time in Unix seconds.

    `reward`: over the attempts with a reward, as `lowest` and `highest`. `success`: over all finished
    attempts.
    """

    at: float
    reward: Estimate | None
    success: Estimate | None
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything about one run but its episodes. Standard errors are over tasks."""

    summary: RunSummary
    tasks: tuple[TaskReport, ...]
    success_rate: Estimate | None
    """The mean of the tasks' pass@1."""
    task_reward: Estimate | None
    """The mean of the tasks' mean rewards."""
    passes: tuple[PassAtK, ...]
    lost: Mapping[str, int]
    curve: tuple[CurvePoint, ...]
    curve_by: Literal["step", "time"]


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task in several runs; `reports` are in their order, None for a run that did not play it.

    `differences`: of the success rates, each further run's minus the first run's; None unless both have one.
    """

    suite: str
    task: str
    reports: tuple[TaskReport | None, ...]
    differences: tuple[float | None, ...]

    @property
    def rates(self) -> list[float | None]:
        """The success rate in each run; None without finished attempts."""
        return [None if each is None or each.pass_1 is None else each.pass_1.mean for each in self.reports]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs or more by task.

    `differences`: of each further run, the mean over the tasks that it and the first have finished attempts
    at, with the standard error of paired values: tasks differ far more from each other than runs do.
    """

    runs: tuple[RunSummary, ...]
    tasks: tuple[TaskComparison, ...]
    differences: tuple[Estimate | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDetails:
    """One episode with its trajectory's numbers and first lines."""

    summary: EpisodeSummary
    launch_time: str | None
    head: JsonObject | None
    """The trajectory's first line; None if it has none, or if it is too long."""
    ready: JsonObject | None
    """The line `ready`, under the same conditions."""
    system_prompt: Text | None
    task_prompt: Text | None
    claim: JsonObject | None
    """How the attempt was closed."""
    answer: Text | None
    verdict: JsonObject | None
    """As it was signed; None if there is none, or if only `verdict_text` has it."""
    verdict_text: str | None
    """Of any length."""
    calls: int
    """Number in the trajectory now, as are `notes`."""
    notes: int
    size_bytes: int
    """Of the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEntry:
    """One call. Times in Unix seconds."""

    seq: int
    name: str
    server: str | None
    tool: str | None
    """None, as is `server`, for a call that was never sent."""
    time: float
    seconds: float | None
    failed: bool
    replayed: bool
    """Whether it was made again before the episode, a branch, was ready."""
    arguments: Text | None
    reply: Text | None
    """JSON of the result, of the JSON-RPC error or of this server's failure; None without a reply."""
    reply_kind: ReplyKind | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEntry:
    """A message of the model's own. `calls`: how many calls were before it; `number` counts notes from 1."""

    number: int
    calls: int
    time: float
    role: str
    text: Text
    usage: Mapping[str, float]


Entry: TypeAlias = CallEntry | NoteEntry


@dataclass(frozen=True, slots=True)
class UsageSums:
    """Tokens and cost by name, summed over an episode's notes. `is_cut`: over the first notes only."""

    numbers: Mapping[str, float]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class CallTime:
    """When a call ran: `start` in seconds after the first call. `seconds`: None while it runs."""

    seq: int
    start: float
    seconds: float | None
    failed: bool


@dataclass(frozen=True, slots=True)
class Sums:
    """Count, sum and sum of squares of some values."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        found = list(values)
        return cls(len(found), sum(found), sum(value * value for value in found))

    @classmethod
    def of_shares(cls, successes: int, attempts: int) -> Self:
        """Sums of attempts whose values are 1 for a success and else 0."""
        return cls(attempts, successes, successes)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def estimate(self) -> Estimate | None:
        """The mean with its standard error, the sample's deviation over the root of the count."""
        if not self.count:
            return None
        mean = self.total / self.count
        if self.count == 1:
            return Estimate(mean, None, 1)
        # Rewards are of the order of 1, so that the difference of sums is exact enough; never below zero.
        variance = max(0.0, self.squares - self.count * mean * mean) / (self.count - 1)
        return Estimate(mean, math.sqrt(variance / self.count), self.count)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`: the k for which reports have pass@k."""
    return [2**power for power in range(most.bit_length())]
