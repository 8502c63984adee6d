"""Batches: a fixed number of episodes at a time, one after another, until there are no more tasks.

Results are yielded as they are ready. A worker whose result nobody has taken waits with it, so that no more
is played than is consumed; its sandbox is closed by then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import string
import sys
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sized,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from itertools import count
from os import PathLike
from typing import TypeVar

import anyio
from anyio.abc import ObjectSendStream, TaskGroup

from decathlon_client.attempts import Attempt, AttemptRun, GroupLimits, Plan, Player, PlayerFailedError
from decathlon_client.batch_results import (
    Pace,
    Result,
    ShowTally,
    Summary,
    SummaryCounts,
    Tally,
    progress_display,
)
from decathlon_client.client_errors import ClientError, ConnectionLostError, RequestError
from decathlon_client.client_values import ATTEMPT, GROUP, RUN, Task, one_line
from decathlon_client.opener import EpisodeOpener
from decathlon_client.resume import VerdictRecord, verdict_record
from decathlon_client.task_groups import background_tasks, own_cancellations

SHOW_SECONDS = 1.0
"""Interval at which the progress is shown, besides every change."""
MAX_LOST = 3
"""How often an attempt is played again because its node of a cluster was lost."""

log = logging.getLogger("decathlon.client")
T = TypeVar("T")


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
        self._attempts = _attempts_at(tasks, plan.n, verdicts)
        self._plan = plan
        self._show = show
        self._group_limits = GroupLimits(plan.group_seconds)
        self._attempting = anyio.Lock()
        self._error: Exception | None = None
        self._was_run = False

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
        `failure`. An error of the iterable of tasks is raised after the results of drawn tasks; so is
        ConnectionLostError if the server stayed away for `patience_seconds`: the other tasks are not drawn.
        Raises RuntimeError if it was called before.
        """
        if self._was_run:
            raise RuntimeError("this batch was run before: its tasks are played; open another batch")
        self._was_run = True
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

        Otherwise as `run`. A group is in the order of its attempts; groups come as they are ready. A group
        that is not complete, because an error ended the batch, is not yielded.
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
                while (attempt := await self._next()) is not None:
                    await send.send(await self._play(attempt, player))
            except anyio.BrokenResourceError:
                pass  # nobody takes results any more
            except asyncio.CancelledError:
                if anyio.current_effective_deadline() == -math.inf:
                    raise
                # A task group takes the end of a cancelled task for its own cancellation: nobody would hear
                # that an episode has no result.
                self._error = self._error or RuntimeError("a worker of the batch was cancelled from outside")

    async def _next(self) -> Attempt | None:
        """The next episode to play; None if there is none, drawing it failed, or the server is gone."""
        async with self._attempting:
            if self._error is not None:
                return None
            try:
                with own_cancellations("the iterable of tasks"):
                    return await anext(self._attempts, None)
            except Exception as error:  # noqa: BLE001
                self._error = error
                return None

    async def _play(self, attempt: Attempt, player: Player[T]) -> Result[T]:
        """The result of an episode, played now if it has none in the file of `resume`."""
        if self._verdicts is None:
            return await self._play_now(attempt, player)
        recorded = self._verdicts.result(attempt.key, attempt.index, attempt.group)
        if recorded is None:
            played = await self._play_now(attempt, player)
            try:
                self._verdicts.append(attempt.key, played, self._plan.run, attempt.launch_time)
            except (OSError, ValueError) as error:
                self._error = self._error or error
            return played
        assert recorded.verdict is not None
        self._tally.scored += 1
        self._tally.rewards += recorded.verdict.reward
        self._counts.add(recorded.task, recorded.verdict)
        self._show_tally()
        return recorded

    async def _play_now(self, attempt: Attempt, player: Player[T]) -> Result[T]:
        started, lost = time.monotonic(), list[str]()
        while True:
            run = AttemptRun(self._tally, self._show_tally, self._plan, self._group_limits, attempt, player)
            failure = await self._try(attempt, run)
            if run.lost is None or len(lost) == MAX_LOST:
                break
            # The attempt says nothing about the agent, and other nodes can play it.
            log.warning("Episode %s is played again: %s", run.lost, failure)
            lost.append(run.lost)
            run.discard()
        fault = run.outcome(failure)
        task = attempt.task if isinstance(attempt.task, str) else attempt.task.id
        error = failure if isinstance(failure, ClientError) else None
        episode, page = run.episode or (error and error.episode), run.page or (error and error.page)
        if fault is not None:
            name = page or episode
            who = f"Episode {name} of {task}" if name else f"An attempt at {task} without an episode"
            log.warning("%s has no reward: %s", who, one_line(str(failure)))
            if isinstance(failure, PlayerFailedError):
                log.debug("The player of episode %s raised:\n%s", page or episode, failure.traceback)
        self._pace.note_end()
        self._counts.add(task, run.verdict)
        self._show_tally()
        return Result(
            index=attempt.index,
            task=task,
            group=attempt.group,
            attempt=attempt.number,
            episode=episode,
            played=run.played,
            verdict=run.verdict,
            failure=failure if fault else None,
            fault=fault,
            seconds=time.monotonic() - started,
            lost=tuple(lost),
            page=page,
        )

    async def _try(self, attempt: Attempt, run: AttemptRun[T]) -> Exception | None:
        """Open an episode and play it; returns what failed."""
        try:
            labels = {GROUP: str(attempt.group), ATTEMPT: str(attempt.number)}
            with self._group_limits.limit(attempt.group) as limit:
                async with self._opener.open(
                    attempt.task, launch_time=attempt.launch_time, labels=labels
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


async def _attempts_at(
    tasks: Iterable[str | Task] | AsyncIterable[str | Task], n: int, verdicts: VerdictRecord | None
) -> AsyncIterator[Attempt]:
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
            # A listed task's prompt has its launch time.
            launch_time = launch_time or (None if isinstance(task, str) else task.launch_time)
            launch_time = launch_time or datetime.now().astimezone().isoformat(timespec="seconds")
        for number in range(n):
            yield Attempt(next(indices), task, group, number, launch_time, occurrence)
        group += 1


async def _iterate(tasks: Iterable[str | Task] | AsyncIterable[str | Task]) -> AsyncIterator[str | Task]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task


def run_name(run: str | None, labels: Mapping[str, str]) -> str:
    """The name of a batch's run: as given, or the date, the time and four letters.

    Raises ValueError if the labels set what a batch sets.
    """
    own = [name for name in (GROUP, ATTEMPT, *([RUN] if run else [])) if name in labels]
    if own:
        raise ValueError(f"a batch sets the labels {', '.join(own)} itself")
    letters = "".join(random.choices(string.ascii_lowercase, k=4))
    return run or labels.get(RUN) or f"{datetime.now():%Y-%m-%d-%H%M%S}-{letters}"


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
        with progress_display(progress) as show:
            async with background_tasks() as workers:
                batch = Batch(opener, workers, tasks, replace(plan, run=name), show, verdicts)
                if show is not None:
                    workers.start_soon(batch.keep_shown)
                with opener.close_budget.shorten_on_interrupt():
                    yield batch
