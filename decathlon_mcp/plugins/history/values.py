"""What `EpisodeHistory` returns. Nothing here has a handle: `public_id` names an episode, without access.

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
RunColumn: TypeAlias = Literal["newest", "run", "success", "reward", "episodes", "lost", "tasks"]


@dataclass(frozen=True, slots=True)
class Order:
    """The order of episodes. Among equals the newest is first, or last if not `descending`.

    `result`, descending: lost episodes, then failed ones from the lowest reward, live ones, and successes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeQuery:
    """Which episodes are wanted; what is None does not matter.

    `labels`: those that an episode must have, with these values. `task`: a task's id as clients spell it.
    `live`: it has not finished. `failed`: it has finished without success, lost ones included. `lost`: it has
    finished without a reward. `stray`: it has no run, and ended before it was claimed. `owner`: name of the
    token that it belongs to. `with_branches`: also those that replay or branch from another episode.
    `branch_of`: only the branches of this episode.
    """

    run: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    suite: str | None = None
    task: str | None = None
    live: bool | None = None
    failed: bool | None = None
    lost: bool | None = None
    stray: bool | None = None
    owner: str | None = None
    order: Order = Order()
    with_branches: bool = False
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
    """One episode, from its row. Times in Unix seconds.

    `owner`: name of its token. `calls`: known from the claim on; None before, and for one whose server died.
    `status`, `success`, `reward`, `turns`: of its verdict. `reason`: why it was lost; None if it was not.
    `cause`: the error behind its end, if there was one.
    `is_derived`: it replays or branches from another. `has_files`: its trajectory is still there.
    `origin`: only of a branch.
    """

    public_id: str
    suite: str
    task: str
    phase: str
    owner: str | None
    labels: Mapping[str, str]
    started_at: float
    ended_at: float | None
    ending: str | None
    calls: int | None
    turns: int | None
    status: str | None
    success: bool | None
    reward: float | None
    reason: str | None
    cause: str | None
    is_live: bool
    is_derived: bool
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

    `branches`: those that have branches, then the others; of each the best first. `hidden`: how many more.
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
    """Attempts, counted. Of the `finished` ones, `scored` have a reward and `lost` have none.

    `successes` of the scored ones succeeded, as their evaluator decided, whatever their reward is.
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
        """Successes over all finished attempts, lost ones included; None if none has finished."""
        return self.successes / self.finished if self.finished else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run: the episodes with this label `run`. Times in Unix seconds.

    `mean_reward`: over the attempts with a reward. `pinned`: every one of its episodes is kept.
    """

    name: str
    counts: Counts
    tasks: int
    mean_reward: float | None
    started_at: float
    """When its first episode started."""
    newest_at: float
    """When its newest episode started."""
    pinned: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` values, with its standard error; the error is None below two values."""

    mean: float
    standard_error: float | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The attempts of one run at one task.

    `pass_1`: the share of finished attempts that succeeded. `mean_reward`, `mean_turns`, `mean_calls`: over
    those that have one. See `numbers` for `pass_at` and `pass_all`.
    """

    suite: str
    task: str
    counts: Counts
    pass_1: Estimate | None
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

    `reward`: over the attempts with a reward, as `lowest` and `highest`. `success`: over all finished ones.
    """

    at: float
    reward: Estimate | None
    success: Estimate | None
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything about one run but its episodes.

    `success_rate` is the mean of the tasks' pass@1, `task_reward` that of the tasks' mean rewards, both with
    their standard error over tasks. `lost`: the number of lost episodes for each reason.
    """

    summary: RunSummary
    tasks: tuple[TaskReport, ...]
    success_rate: Estimate | None
    task_reward: Estimate | None
    passes: tuple[PassAtK, ...]
    lost: Mapping[str, int]
    curve: tuple[CurvePoint, ...]
    curve_by: Literal["step", "time"]


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task in several runs; `reports` are in their order, None for a run that did not play it.

    `differences`: of the success rates, each further run's minus the first one's; None unless both have one.
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
    at. Its standard error is that of paired values: tasks differ far more from each other than runs do.
    """

    runs: tuple[RunSummary, ...]
    tasks: tuple[TaskComparison, ...]
    differences: tuple[Estimate | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDetails:
    """One episode. `head`, `ready`: its trajectory's first lines; None if it has none, or they are too long.

    `launch_time`: ISO 8601. `claim`: how the attempt was closed. `answer`: the agent's words in its claim.
    `verdict`: as it was signed; None if there is none, or if it is too long, when only `verdict_text` has it.
    `calls`, `notes`: how many the trajectory has now. `size_bytes`: of the trajectory.
    """

    summary: EpisodeSummary
    launch_time: str | None
    head: JsonObject | None
    ready: JsonObject | None
    system_prompt: Text | None
    task_prompt: Text | None
    claim: JsonObject | None
    answer: Text | None
    verdict: JsonObject | None
    verdict_text: str | None
    calls: int
    notes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEntry:
    """One call. Times in Unix seconds. `server` and `tool` are None for a call that was never sent.

    `replayed`: it was made again before the episode, a branch, was ready.

    `reply`: JSON of the tool's result, of the JSON-RPC error or of this server's failure, see `reply_kind`;
    both are None if there is no reply.
    """

    seq: int
    name: str
    server: str | None
    tool: str | None
    time: float
    seconds: float | None
    failed: bool
    replayed: bool
    arguments: Text | None
    reply: Text | None
    reply_kind: Literal["result", "error", "failure"] | None


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


@dataclass(slots=True)
class Sums:
    """The count of values, their sum and that of their squares, which can be added to others."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        sums = cls()
        for value in values:
            sums.count += 1
            sums.total += value
            sums.squares += value * value
        return sums

    @classmethod
    def of_shares(cls, successes: int, attempts: int) -> Self:
        """Of that many ones among zeros."""
        return cls(attempts, successes, successes)

    def add(self, other: Sums) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

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
