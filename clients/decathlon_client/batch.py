"""Batches: a fixed number of episodes at a time, one after another, until there are no more tasks.

Results are yielded as they are ready. A worker whose result nobody has taken waits with it, so that no more
is played than is consumed; its sandbox is closed by then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sized,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from os import PathLike
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

import anyio
from anyio.abc import ObjectSendStream, TaskGroup

from decathlon_client.background import background_tasks, own_cancellations
from decathlon_client.episode import Episode
from decathlon_client.errors import ClientError, ConnectionLostError, RequestError
from decathlon_client.group_limits import GroupLimits
from decathlon_client.labels import ATTEMPT, GROUP, RUN, run_name
from decathlon_client.opener import EpisodeOpener
from decathlon_client.player_failure import PlayerFailedError, is_players_fault, player_failure
from decathlon_client.progress import Pace, ShowTally, Tally, progress_display
from decathlon_client.results import Fault, Result, Summary, SummaryCounts
from decathlon_client.resume import Place, VerdictRecord, verdict_record
from decathlon_client.values import Task, Verdict

SHOW_SECONDS = 1.0
"""Interval at which the progress is shown, besides every change."""
MAX_LOST = 3
"""How often an attempt is played again because its node of a cluster was lost."""

log = logging.getLogger("decathlon.client")

T = TypeVar("T")
Late: TypeAlias = Literal["truncate", "drop"]
"""What a batch does with the attempts that play at the deadline of their group."""
Player: TypeAlias = Callable[[Episode], Awaitable[T]]
"""Plays one episode; its return value is kept in the result. An unclaimed attempt is graded as it is.

So is one whose player raises the RequestError that a task's server answered with. What else a player raises
is a PlayerFailedError of the result, and the reason for which the episode is closed.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch plays its tasks: see `Decathlon.batch`. Raises ValueError for wrong values."""

    run: str
    concurrency: int
    n: int
    player_seconds: float | None
    group_seconds: float | None
    late: Late

    def __post_init__(self) -> None:
        for name, value in (("concurrency", self.concurrency), ("n", self.n)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        limits = {"player_seconds": self.player_seconds, "group_seconds": self.group_seconds}
        for name, seconds in limits.items():
            if seconds is not None and not seconds > 0:  # also for NaN
                raise ValueError(f"{name} must be more than 0, not {seconds}")
        if self.late not in get_args(Late):
            raise ValueError(f"late must be one of {', '.join(get_args(Late))}, not {self.late!r}")


@dataclass(frozen=True, slots=True)
class _Draw:
    """One episode to be played. `launch_time` is the same for its group; None for the server's clock."""

    index: int
    task: str | Task
    group: int
    attempt: int
    launch_time: str | None
    occurrence: int = 0

    @property
    def place(self) -> Place:
        task = self.task if isinstance(self.task, str) else self.task.id
        return Place(task, self.occurrence, self.attempt)


class Batch:
    """A batch of episodes; made by `Decathlon.batch`."""

    def __init__(
        self,
        opener: EpisodeOpener,
        workers: TaskGroup,
        tasks: Iterable[str | Task] | AsyncIterable[str | Task],
        plan: Plan,
        show: ShowTally | None,
        verdicts: VerdictRecord | None,
    ) -> None:
        self._tally = Tally(total=len(tasks) * plan.n if isinstance(tasks, Sized) else None)
        self._pace = Pace()
        self._counts = SummaryCounts()
        self._opener = opener
        self._workers = workers
        self._verdicts = verdicts
        self._draws = _draw_each(tasks, plan.n, verdicts)
        self._plan = plan
        self._show = show
        self._group_limits = GroupLimits(plan.group_seconds)
        self._drawing = anyio.Lock()
        self._error: Exception | None = None

    @property
    def tally(self) -> Tally:
        """The current progress."""
        self._tally.away_seconds = self._opener.away_seconds
        self._pace.update(self._tally)
        return self._tally

    @property
    def summary(self) -> Summary:
        """Mean, spread and pass@k of each task, over the episodes that have ended until now."""
        return self._counts.summary()

    @property
    def run_name(self) -> str:
        """The label `run` of the batch's episodes."""
        return self._plan.run

    async def run(self, player: Player[T]) -> AsyncGenerator[Result[T]]:
        """Play the tasks and yield the results as they are ready. May be called once, or `run_groups`.

        To stop early, leave the loop, then the batch's `async with`. A failed episode is a result with a
        `failure`. An error of the iterable of tasks is raised after the results of the drawn ones; so is
        ConnectionLostError if the server stayed away for `patience_seconds`: the other tasks are not drawn.
        """
        send, receive = anyio.create_memory_object_stream[Result[T]]()
        with receive:
            with send:
                for _ in range(self._plan.concurrency):
                    self._workers.start_soon(self._work, player, send.clone())
            async for result in receive:
                with self._group_limits.paused():
                    yield result
        if self._error is not None:
            raise self._error

    async def run_groups(self, player: Player[T]) -> AsyncGenerator[list[Result[T]]]:
        """Play the tasks and yield the `n` results of each task together, as soon as its last one is ready.

        Otherwise as `run`. A group is in the order of its attempts; groups come as they are ready. One that
        is not complete, because an error ended the batch, is not yielded.
        """
        # Tasks are drawn one after the other, so that no more than `concurrency` groups are incomplete.
        groups: dict[int, list[Result[T]]] = {}
        async with aclosing(self.run(player)) as results:
            async for result in results:
                group = groups.setdefault(result.group, [])
                group.append(result)
                if len(group) == self._plan.n:
                    yield sorted(groups.pop(result.group), key=lambda result: result.attempt)

    async def keep_shown(self) -> None:
        """Show the progress every second: the time left and an outage change without any episode."""
        while True:
            await anyio.sleep(SHOW_SECONDS)
            self._show_tally()

    def _show_tally(self) -> None:
        if self._show is not None:
            self._show(self.tally)

    async def _work(self, player: Player[T], send: ObjectSendStream[Result[T]]) -> None:
        async with send:
            try:
                while (draw := await self._draw()) is not None:
                    await send.send(await self._play(draw, player))
            except anyio.BrokenResourceError:
                pass  # nobody takes results any more
            except asyncio.CancelledError:
                if anyio.current_effective_deadline() == -math.inf:
                    raise
                # A task group takes the end of a cancelled task for its own cancellation: nobody would hear
                # that an episode has no result.
                self._error = self._error or RuntimeError("a worker of the batch was cancelled from outside")

    async def _draw(self) -> _Draw | None:
        """The next episode to play; None if there is none, drawing it failed, or the server is gone."""
        async with self._drawing:
            if self._error is not None:
                return None
            try:
                with own_cancellations("the iterable of tasks"):
                    return await anext(self._draws, None)
            except Exception as error:  # noqa: BLE001
                self._error = error
                return None

    async def _play(self, draw: _Draw, player: Player[T]) -> Result[T]:
        """The result of an episode, played now if it has none in the file of `resume`."""
        if self._verdicts is None:
            return await self._play_now(draw, player)
        recorded = self._verdicts.result(draw.place, draw.index, draw.group)
        if recorded is None:
            played = await self._play_now(draw, player)
            try:
                self._verdicts.append(draw.place, played, self._plan.run, draw.launch_time)
            except (OSError, ValueError) as error:
                self._error = self._error or error
            return played
        assert recorded.verdict is not None
        self._tally.scored += 1
        self._tally.rewards += recorded.verdict.reward
        self._counts.add(recorded.task, recorded.verdict)
        self._show_tally()
        return recorded

    async def _play_now(self, draw: _Draw, player: Player[T]) -> Result[T]:
        started, lost = time.monotonic(), list[str]()
        while True:
            run = _EpisodeRun(self._tally, self._show_tally, self._plan, self._group_limits, draw, player)
            failure = await self._try(draw, run)
            if run.lost is None or len(lost) == MAX_LOST:
                break
            # The attempt says nothing about the agent, and other nodes can play it.
            log.warning("Episode %s is played again: %s", run.lost, failure)
            lost.append(run.lost)
            run.discard()
        fault = run.outcome(failure)
        task = draw.task if isinstance(draw.task, str) else draw.task.id
        error = failure if isinstance(failure, ClientError) else None
        episode, page = run.episode or (error and error.episode), run.page or (error and error.page)
        if fault is not None:
            log.warning("Episode %s of %s has no reward: %s", page or episode, task, failure)
            if isinstance(failure, PlayerFailedError):
                log.debug("The player of episode %s raised:\n%s", page or episode, failure.traceback)
        self._pace.note_end()
        self._counts.add(task, run.verdict)
        self._show_tally()
        return Result(
            index=draw.index,
            task=task,
            group=draw.group,
            attempt=draw.attempt,
            episode=episode,
            played=run.played,
            verdict=run.verdict,
            failure=failure if fault else None,
            fault=fault,
            seconds=time.monotonic() - started,
            lost=tuple(lost),
            page=page,
        )

    async def _try(self, draw: _Draw, run: _EpisodeRun[T]) -> Exception | None:
        """Open an episode and play it; returns what failed."""
        try:
            labels = {GROUP: str(draw.group), ATTEMPT: str(draw.attempt)}
            with self._group_limits.limit(draw.group) as limit:
                async with self._opener.open(
                    draw.task, launch_time=draw.launch_time, labels=labels
                ) as episode:
                    if self._plan.late == "truncate":
                        self._group_limits.lift(limit)
                    await run.play(episode)
            if limit.cancelled_caught and run.verdict is None:
                return run.late_error()
        except Exception as error:  # noqa: BLE001
            if run.episode is None and self._error is None:
                # Of every other task too: it would wait as long, or be refused for the same options.
                if isinstance(error, ConnectionLostError):
                    self._error = ConnectionLostError(
                        f"the server is away, so that no more tasks are played: {error.message}"
                    )
                elif isinstance(error, RequestError) and error.code == "bad_request":
                    self._error = error
            return error
        return None


class _EpisodeRun(Generic[T]):
    """Plays and grades one episode, and keeps the tally up to date.

    `lost`: the episode, if its node of a cluster was lost before it had a verdict.
    """

    def __init__(
        self,
        tally: Tally,
        show: Callable[[], None],
        plan: Plan,
        group_limits: GroupLimits,
        draw: _Draw,
        player: Player[T],
    ) -> None:
        self.episode: str | None = None
        self.page: str | None = None
        self.lost: str | None = None
        self.played: T | None = None
        self.verdict: Verdict | None = None
        self._tally = tally
        self._show = show
        self._plan = plan
        self._group_limits = group_limits
        self._draw = draw
        self._player = player
        self._is_late = False
        self._phase: Literal["opening", "playing", "grading"] = "opening"
        self._count("opening", 1)

    async def play(self, episode: Episode) -> None:
        """Play the episode and grade it. Raises what fails."""
        self.episode = episode.public_id
        self.page = episode.page
        try:
            await self._play(episode)
        finally:
            loss = episode._loss  # pyright: ignore[reportPrivateUsage]
            self.lost = episode.public_id if loss is not None and self.verdict is None else None

    def discard(self) -> None:
        """Do not count this run, which is followed by another one of the same attempt."""
        self._count(self._phase, -1)

    async def _play(self, episode: Episode) -> None:
        self._enter("playing")
        with (
            self._group_limits.limit(self._draw.group) as group_limit,
            anyio.move_on_after(self._plan.player_seconds) as time_limit,
        ):
            try:
                with own_cancellations("the player"):
                    self.played = await self._player(episode)
            except Exception as error:
                # An agent can end its own episode; this is a reward of 0, and no failure. So is what a player
                # does not catch of the errors that a task's server, or an agent in its place, answers with.
                ended_with_reward = episode._ended_with_reward  # pyright: ignore[reportPrivateUsage]
                if not _is_from_task(error):
                    if is_players_fault(error):
                        raise player_failure(error) from error
                    if not await ended_with_reward():
                        raise
        self._enter("grading")
        if (group_limit.cancelled_caught or time_limit.cancelled_caught) and not episode.claimed:
            await episode.truncate()
        self.verdict = await episode.evaluate()

    def late_error(self) -> TimeoutError:
        """The failure of an attempt that is dropped at the deadline of its group."""
        self._is_late = True
        place = self._draw.place
        return TimeoutError(
            f"attempt {place.attempt} of {place.task} is dropped: it was {self._phase} when the "
            f"{self._plan.group_seconds:g} s of its group were over"
        )

    def outcome(self, failure: Exception | None) -> Fault | None:
        """Count the outcome. Returns whose fault it is that there is no verdict; None if there is one."""
        self._count(self._phase, -1)
        fault: Fault | None = None
        if self.verdict is not None:
            self._tally.rewards += self.verdict.reward
        elif self._is_late:
            fault = "deadline"
        else:
            fault = "player" if self._phase == "playing" and is_players_fault(failure) else "infrastructure"
        state = {None: "scored", "player": "broken", "infrastructure": "lost", "deadline": "dropped"}[fault]
        self._count(state, 1)
        return fault

    def _enter(self, phase: Literal["playing", "grading"]) -> None:
        self._count(self._phase, -1)
        self._count(phase, 1)
        self._phase = phase
        self._show()

    def _count(self, state: str, change: int) -> None:
        setattr(self._tally, state, getattr(self._tally, state) + change)


def _is_from_task(error: BaseException) -> bool:
    """Whether the error is a reply of a task's server."""
    return isinstance(error, RequestError) and error.data.get("source") == "task"


async def _draw_each(
    tasks: Iterable[str | Task] | AsyncIterable[str | Task], n: int, verdicts: VerdictRecord | None
) -> AsyncIterator[_Draw]:
    """The episodes of a batch: each task `n` times, one task after the other."""
    indices, group, occurrences = count(), 0, Counter[str]()
    async for task in _iterate(tasks):
        name = task if isinstance(task, str) else task.id
        occurrence = occurrences[name]
        occurrences[name] += 1
        launch_time = None
        if n > 1:
            # The rest of a group gets the prompt of its attempts that were played before.
            launch_time = None if verdicts is None else verdicts.launch_time(name, occurrence)
            launch_time = launch_time or datetime.now().astimezone().isoformat(timespec="seconds")
        for attempt in range(n):
            yield _Draw(next(indices), task, group, attempt, launch_time, occurrence)
        group += 1


async def _iterate(tasks: Iterable[str | Task] | AsyncIterable[str | Task]) -> AsyncIterator[str | Task]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task


@asynccontextmanager
async def open_batch(
    make_opener: Callable[[Mapping[str, str]], EpisodeOpener],
    tasks: Iterable[str | Task] | AsyncIterable[str | Task],
    plan: Plan,
    labels: Mapping[str, str],
    progress: bool,
    resume: str | PathLike[str] | VerdictRecord | None,
) -> AsyncGenerator[Batch]:
    """A batch that is ready to run. `plan.run` may be empty: it is named then."""
    with verdict_record(resume) as verdicts:
        name = run_name(plan.run or (None if verdicts is None else verdicts.run), labels)
        opener = make_opener({**labels, RUN: name})
        if progress:
            # Before the bar is drawn.
            sys.stderr.write(f"run {name}\n")
        async with _running(opener, tasks, replace(plan, run=name), progress, verdicts) as batch:
            yield batch


@asynccontextmanager
async def _running(
    opener: EpisodeOpener,
    tasks: Iterable[str | Task] | AsyncIterable[str | Task],
    plan: Plan,
    progress: bool,
    verdicts: VerdictRecord | None,
) -> AsyncGenerator[Batch]:
    with progress_display(progress) as show:
        async with background_tasks() as workers:
            batch = Batch(opener, workers, tasks, plan, show, verdicts)
            if show is not None:
                workers.start_soon(batch.keep_shown)
            with opener.close_budget.shorten_on_interrupt():
                yield batch
