"""A batch: so many episodes at a time, one after another, until there are no more tasks.

Results come as they are made. A result that nobody has taken holds its place, so that no more is played than
is taken; no sandbox waits with it.
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
from decathlon_client.progress import Show, shown
from decathlon_client.tally import Tally
from decathlon_client.values import Task, Verdict

T = TypeVar("T")
Player: TypeAlias = Callable[[Episode], Awaitable[T]]
"""Plays one episode; what it returns is kept. It claims by itself; what it leaves open is graded so."""

Fault: TypeAlias = Literal["infrastructure", "player"]


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """What became of one task. Either there is a verdict, or a failure and whose fault it is.

    `index` counts the tasks from 0, in the order they were drawn. `played` is what the player returned, None
    where it did not come to that. `seconds` are from the first try to open it to its end.
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
        """None, and never zero, where there is no verdict."""
        return None if self.verdict is None else self.verdict.reward


class Batch:
    """Made by `Decathlon.batch`. `tally` says how far it is, at any time."""

    tally: Tally

    def __init__(
        self,
        opener: EpisodeOpener,
        workers: TaskGroup,
        tasks: Iterable[str | Task] | AsyncIterable[str | Task],
        *,
        concurrency: int,
        player_seconds: float | None,
        show: Show,
    ) -> None:
        self.tally = Tally(total=len(tasks) if isinstance(tasks, Sized) else None)
        self._openings = opener
        self._workers = workers
        self._tasks = _numbered(tasks)
        self._concurrency = concurrency
        self._player_seconds = player_seconds
        self._show = show
        self._drawing = anyio.Lock()
        self._drawn_error: Exception | None = None

    async def run(self, player: Player[T]) -> AsyncGenerator[Result[T]]:
        """The results, as they come. To stop early, leave the loop, then the batch's `async with`.

        A failure is its own result's. Raises what drawing a task raises. Once for each batch.
        """
        send, receive = anyio.create_memory_object_stream[Result[T]]()
        with receive:
            with send:
                for _ in range(self._concurrency):
                    self._workers.start_soon(self._work, player, send.clone())
            async for result in receive:
                yield result
        if self._drawn_error is not None:
            raise self._drawn_error

    async def _work(self, player: Player[T], send: ObjectSendStream[Result[T]]) -> None:
        async with send:
            while True:
                drawn = await self._drawn()
                if drawn is None:
                    return
                index, task = drawn
                try:
                    await send.send(await self._played(index, task, player))
                except anyio.BrokenResourceError:
                    return

    async def _drawn(self) -> tuple[int, str | Task] | None:
        """The next task; None where there is none, or none could be drawn."""
        async with self._drawing:
            try:
                return await anext(self._tasks, None)
            except Exception as error:  # noqa: BLE001
                self._drawn_error = error
                return None

    async def _played(self, index: int, task: str | Task, player: Player[T]) -> Result[T]:
        started = time.monotonic()
        attempt = _Attempt(self.tally, self._show, self._player_seconds, player)
        failure: Exception | None = None
        try:
            async with self._openings.opened(task) as episode:
                await attempt.play(episode)
        except Exception as error:  # noqa: BLE001
            failure = error
        fault = attempt.over(failure)
        return Result(
            index=index,
            task=task if isinstance(task, str) else task.id,
            played=attempt.played,
            verdict=attempt.verdict,
            failure=failure if fault else None,
            fault=fault,
            seconds=time.monotonic() - started,
        )


class _Attempt(Generic[T]):
    """One task on its way through the tally."""

    def __init__(self, tally: Tally, show: Show, player_seconds: float | None, player: Player[T]) -> None:
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
        with anyio.move_on_after(self._player_seconds) as patience:
            self.played = await self._player(episode)
        self._enter("grading")
        if patience.cancelled_caught and not episode.claimed:
            await episode.truncate()
        self.verdict = await episode.evaluate()

    def over(self, failure: Exception | None) -> Fault | None:
        """Whose fault it is that there is no verdict; None where there is one."""
        self._count(self._phase, -1)
        fault: Fault | None = None
        if self.verdict is not None:
            self._tally.rewards += self.verdict.reward
        else:
            fault = "player" if self._phase == "playing" and _is_players(failure) else "infrastructure"
        self._count({None: "scored", "player": "broken", "infrastructure": "lost"}[fault], 1)
        self._show(self._tally)
        return fault

    def _enter(self, phase: Literal["playing", "grading"]) -> None:
        self._count(self._phase, -1)
        self._count(phase, 1)
        self._phase = phase
        self._show(self._tally)

    def _count(self, what: str, by: int) -> None:
        setattr(self._tally, what, getattr(self._tally, what) + by)


def _is_players(error: BaseException | None) -> bool:
    """Of a group: where anything in it is."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is_players(each) for each in cast("BaseExceptionGroup[BaseException]", error).exceptions)
    return not isinstance(error, ClientError) or isinstance(error, MISTAKES)


async def _numbered(
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
async def batching(
    opener: EpisodeOpener,
    tasks: Iterable[str | Task] | AsyncIterable[str | Task],
    concurrency: int,
    progress: bool,
    player_seconds: float | None,
) -> AsyncGenerator[Batch]:
    """Raises ValueError for a concurrency below 1."""
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    with shown(progress) as show:
        async with background_tasks() as workers:
            batch = Batch(
                opener,
                workers,
                tasks,
                concurrency=concurrency,
                player_seconds=player_seconds,
                show=show,
            )
            with opener.close_budget.hurried():
                yield batch
