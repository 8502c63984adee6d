"""Batches: a fixed number of episodes at a time, one after another, until there are no more tasks.

Results are yielded as they are ready. A worker whose result nobody has taken waits with it, so that no more
is played than is consumed; its sandbox is closed by then.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar, cast

import anyio
from anyio.abc import ObjectSendStream, TaskGroup

from decathlon_client.background import background_tasks
from decathlon_client.episode import MISTAKES, Episode
from decathlon_client.errors import ClientError
from decathlon_client.opener import EpisodeOpener
from decathlon_client.progress import ShowTally, Tally, progress_display
from decathlon_client.values import Task, Verdict

T = TypeVar("T")
Player: TypeAlias = Callable[[Episode], Awaitable[T]]
"""Plays one episode; its return value is kept in the result. An unclaimed attempt is graded as it is."""

Fault: TypeAlias = Literal["infrastructure", "player"]
"""Whose fault it is that there is no verdict."""


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The result of one task: a verdict, or a failure and whose fault it is.

    `index` counts the tasks from 0 in the order they were drawn. `played` is the player's return value, None
    if the player did not return. `seconds` is the time from the first try to open the episode to its end.
    """

    index: int
    task: str
    played: T | None
    verdict: Verdict | None
    failure: Exception | None = field(compare=False)
    fault: Fault | None
    seconds: float

    @property
    def reward(self) -> float | None:
        """The verdict's reward; None, never zero, if there is no verdict."""
        return None if self.verdict is None else self.verdict.reward


class Batch:
    """A batch of episodes; made by `Decathlon.batch`. `tally` is its current progress."""

    tally: Tally

    def __init__(
        self,
        opener: EpisodeOpener,
        workers: TaskGroup,
        tasks: Iterable[str | Task] | AsyncIterable[str | Task],
        *,
        concurrency: int,
        player_seconds: float | None,
        show: ShowTally,
    ) -> None:
        self.tally = Tally(total=len(tasks) if isinstance(tasks, Sized) else None)
        self._opener = opener
        self._workers = workers
        self._tasks = _enumerate(tasks)
        self._concurrency = concurrency
        self._player_seconds = player_seconds
        self._show = show
        self._drawing = anyio.Lock()
        self._draw_error: Exception | None = None

    async def run(self, player: Player[T]) -> AsyncGenerator[Result[T]]:
        """Play the tasks and yield the results as they are ready. May be called once.

        To stop early, leave the loop, then the batch's `async with`. A failed episode is a result with a
        `failure`; only an error of the iterable of tasks is raised.
        """
        send, receive = anyio.create_memory_object_stream[Result[T]]()
        with receive:
            with send:
                for _ in range(self._concurrency):
                    self._workers.start_soon(self._work, player, send.clone())
            async for result in receive:
                yield result
        if self._draw_error is not None:
            raise self._draw_error

    async def _work(self, player: Player[T], send: ObjectSendStream[Result[T]]) -> None:
        async with send:
            while True:
                drawn = await self._draw()
                if drawn is None:
                    return
                index, task = drawn
                try:
                    await send.send(await self._play(index, task, player))
                except anyio.BrokenResourceError:
                    return

    async def _draw(self) -> tuple[int, str | Task] | None:
        """The next task and its index; None if there is none, or drawing it failed."""
        async with self._drawing:
            try:
                return await anext(self._tasks, None)
            except Exception as error:  # noqa: BLE001
                self._draw_error = error
                return None

    async def _play(self, index: int, task: str | Task, player: Player[T]) -> Result[T]:
        started = time.monotonic()
        run = _TaskRun(self.tally, self._show, self._player_seconds, player)
        failure: Exception | None = None
        try:
            async with self._opener.open(task) as episode:
                await run.play(episode)
        except Exception as error:  # noqa: BLE001
            failure = error
        fault = run.finish(failure)
        return Result(
            index=index,
            task=task if isinstance(task, str) else task.id,
            played=run.played,
            verdict=run.verdict,
            failure=failure if fault else None,
            fault=fault,
            seconds=time.monotonic() - started,
        )


class _TaskRun(Generic[T]):
    """Plays and grades one task's episode, and keeps the tally up to date."""

    def __init__(
        self, tally: Tally, show: ShowTally, player_seconds: float | None, player: Player[T]
    ) -> None:
        self.played: T | None = None
        self.verdict: Verdict | None = None
        self._tally = tally
        self._show = show
        self._player_seconds = player_seconds
        self._player = player
        self._phase: Literal["opening", "playing", "grading"] = "opening"
        self._count("opening", 1)

    async def play(self, episode: Episode) -> None:
        self._enter("playing")
        with anyio.move_on_after(self._player_seconds) as time_limit:
            try:
                self.played = await self._player(episode)
            except Exception as error:
                # An agent can end its own episode; this is a reward of 0, and no failure.
                if _is_players_fault(error) or not await episode.ended_with_reward():
                    raise
        self._enter("grading")
        if time_limit.cancelled_caught and not episode.claimed:
            await episode.truncate()
        self.verdict = await episode.evaluate()

    def finish(self, failure: Exception | None) -> Fault | None:
        """Count the outcome. Returns whose fault it is that there is no verdict; None if there is one."""
        self._count(self._phase, -1)
        fault: Fault | None = None
        if self.verdict is not None:
            self._tally.rewards += self.verdict.reward
        else:
            fault = "player" if self._phase == "playing" and _is_players_fault(failure) else "infrastructure"
        self._count({None: "scored", "player": "broken", "infrastructure": "lost"}[fault], 1)
        self._show(self._tally)
        return fault

    def _enter(self, phase: Literal["playing", "grading"]) -> None:
        self._count(self._phase, -1)
        self._count(phase, 1)
        self._phase = phase
        self._show(self._tally)

    def _count(self, state: str, change: int) -> None:
        setattr(self._tally, state, getattr(self._tally, state) + change)


def _is_players_fault(error: BaseException | None) -> bool:
    """Whether the player caused the error; for a group, whether it caused any error in it."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return any(_is_players_fault(inner) for inner in group.exceptions)
    return not isinstance(error, ClientError) or isinstance(error, MISTAKES)


async def _enumerate(
    tasks: Iterable[str | Task] | AsyncIterable[str | Task],
) -> AsyncIterator[tuple[int, str | Task]]:
    index = 0
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield index, task
            index += 1
    else:
        for index, task in enumerate(tasks):
            yield index, task


@asynccontextmanager
async def open_batch(
    opener: EpisodeOpener,
    tasks: Iterable[str | Task] | AsyncIterable[str | Task],
    concurrency: int,
    progress: bool,
    player_seconds: float | None,
) -> AsyncGenerator[Batch]:
    """A batch that is ready to run. Raises ValueError for a concurrency below 1."""
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    with progress_display(progress) as show:
        async with background_tasks() as workers:
            batch = Batch(
                opener,
                workers,
                tasks,
                concurrency=concurrency,
                player_seconds=player_seconds,
                show=show,
            )
            with opener.close_budget.shorten_on_interrupt():
                yield batch
