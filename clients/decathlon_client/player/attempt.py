"""The attempt at a task: one task of this process owns its episode, whatever the screens do.

However the player ends (a key, a signal, an exception of a screen), the `async with` around the table is
left, and with it every episode is closed.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import anyio
from anyio.abc import TaskGroup

from decathlon_client import (
    ClientError,
    Decathlon,
    Episode,
    EpisodeEndedError,
    NoVerdictError,
    Reply,
    SandboxLostError,
    Task,
    Verdict,
)
from decathlon_client.background import background_tasks
from decathlon_client.values import JsonObject


class Phase(StrEnum):
    """Where an attempt stands, in words for whoever plays."""

    OPENING = "opening"
    PLAYING = "playing"
    GRADING = "grading"
    SCORED = "scored"
    OVER = "over"


@dataclass(slots=True)
class Call:
    """One call of a tool. `reply` is what came, `trouble` why nothing came."""

    number: int
    tool: str
    arguments: JsonObject
    started: float
    finished: float | None = None
    progress: tuple[float, float | None, str | None] | None = None
    reply: Reply | None = None
    trouble: str = ""
    cancelled: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope, repr=False)

    @property
    def running(self) -> bool:
        return self.finished is None

    @property
    def failed(self) -> bool:
        return bool(self.trouble) or (self.reply is not None and self.reply.is_error)

    @property
    def seconds(self) -> float:
        """How long it took, or is taking."""
        return (anyio.current_time() if self.finished is None else self.finished) - self.started

    def cancel(self) -> None:
        """Give it up; the episode goes on."""
        if self.running:
            self.cancelled = True
            self.scope.cancel()


Changed = Callable[["Attempt", Call | None], None]
"""Told of every change: of the attempt, or of one of its calls."""


class Attempt:
    """Made by `Table.sit`. Read by the screens; what they ask for is done in tasks of its own."""

    def __init__(self, task: str, changed: Changed) -> None:
        self.task = task
        self.phase = Phase.OPENING
        self.note = ""
        self.trouble = ""
        self.episode: Episode | None = None
        self.calls: list[Call] = []
        self.verdict: Verdict | None = None
        self.unscored: JsonObject | None = None
        self.left = False
        self.started = anyio.current_time()
        self._changed = changed
        self._numbers = itertools.count(1)
        self._tasks: TaskGroup | None = None
        self._scope = anyio.CancelScope()

    @property
    def running(self) -> list[Call]:
        """The calls under way."""
        return [call for call in self.calls if call.running]

    def call(self, tool: str, arguments: JsonObject) -> Call:
        """Start a call."""
        assert self._tasks is not None, "called before it is ready"
        call = Call(next(self._numbers), tool, arguments, anyio.current_time())
        self.calls.append(call)
        self._tasks.start_soon(self._call, call)
        self._changed(self, call)
        return call

    def claim(self, answer: str | None) -> None:
        """Close the attempt and have it graded."""
        if self._tasks is not None and self.phase is Phase.PLAYING:
            self._move(Phase.GRADING)
            self._tasks.start_soon(self._grade, answer)

    def leave(self) -> None:
        """End the episode; what was claimed is graded all the same."""
        self._scope.cancel()

    async def run(self, d: Decathlon) -> None:
        """The whole of it, until left."""
        try:
            with self._scope:
                async with (
                    d.episode(self.task, on_progress=self._opening) as self.episode,
                    anyio.create_task_group() as self._tasks,
                ):
                    self._move(Phase.PLAYING)
                    await anyio.sleep_forever()
        except ClientError as error:
            self._give_up(error)
        finally:
            self.left = True

    async def _opening(self, progress: float, total: float | None, message: str | None) -> None:
        self.note = message or ""
        self._changed(self, None)

    async def _call(self, call: Call) -> None:
        assert self.episode is not None

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            call.progress = (progress, total, message)
            self._changed(self, call)

        try:
            with call.scope:
                call.reply = await self.episode.call(call.tool, call.arguments, on_progress=on_progress)
        except ClientError as error:
            call.trouble = error.message
            if isinstance(error, (EpisodeEndedError, SandboxLostError)) and self.phase is Phase.PLAYING:
                self._give_up(error)
        call.finished = anyio.current_time()
        call.cancelled = call.scope.cancelled_caught
        self._changed(self, call)

    async def _grade(self, answer: str | None) -> None:
        assert self.episode is not None
        try:
            reply = await self.episode.claim_done(answer)
            if reply.is_error:
                self.note = reply.text
            self.verdict = await self.episode.evaluate(on_progress=self._opening)
        except NoVerdictError as error:
            self.unscored = error.verdict
            self._give_up(error)
        except ClientError as error:
            self._give_up(error)
        else:
            self._move(Phase.SCORED)

    def _give_up(self, error: ClientError) -> None:
        self.trouble = error.message
        self._move(Phase.OVER)

    def _move(self, phase: Phase) -> None:
        self.phase = phase
        self.note = ""
        self._changed(self, None)


class Table:
    """Where one attempt after the other is played."""

    def __init__(self, d: Decathlon, tasks: TaskGroup) -> None:
        self._d = d
        self._tasks = tasks

    async def menu(self) -> list[Task]:
        """The tasks there are, with their prompts."""
        return await self._d.tasks()

    async def require(self, task: str) -> None:
        """Raises UnknownTaskError where there is no such task, as starting it would."""
        if not any(each.id == task for each in await self._d.tasks(prompts=False)):
            async with self._d.episode(task):
                return

    def sit(self, task: str, changed: Changed) -> Attempt:
        """Begin an attempt. What goes wrong with it is in its `trouble`."""
        attempt = Attempt(task, changed)
        self._tasks.start_soon(attempt.run, self._d)
        return attempt


@asynccontextmanager
async def open_table(d: Decathlon) -> AsyncGenerator[Table]:
    """Every attempt ends with the body. Raises ClientError where the server cannot be reached."""
    async with d, background_tasks() as tasks:
        yield Table(d, tasks)


def as_text(value: Any) -> str:
    """Seconds as a clock shows them."""
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
