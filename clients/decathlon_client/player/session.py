"""Attempts played in the terminal: one asyncio task owns each episode, independent of the screens.

However the player ends (a key, a signal, an exception in a screen), leaving `open_sessions` closes every
episode.
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
    """Phase of an attempt, as shown to the user."""

    OPENING = "opening"
    PLAYING = "playing"
    GRADING = "grading"
    SCORED = "scored"
    OVER = "over"


@dataclass(slots=True)
class ToolCall:
    """One tool call: `reply` once it has been answered, `error` if it failed without a reply."""

    number: int
    tool: str
    arguments: JsonObject
    started: float
    finished: float | None = None
    progress: tuple[float, float | None, str | None] | None = None
    reply: Reply | None = None
    error: str = ""
    cancelled: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope, repr=False)

    @property
    def running(self) -> bool:
        return self.finished is None

    @property
    def failed(self) -> bool:
        return bool(self.error) or (self.reply is not None and self.reply.is_error)

    @property
    def seconds(self) -> float:
        """Duration so far."""
        return (anyio.current_time() if self.finished is None else self.finished) - self.started

    def cancel(self) -> None:
        """Cancel the call; the episode continues."""
        if self.running:
            self.cancelled = True
            self.scope.cancel()


Changed = Callable[["PlaySession", ToolCall | None], None]
"""Called after every change of the session or of one of its calls."""


class PlaySession:
    """One attempt at one task, started by `SessionManager.start`.

    Screens read its attributes; the actions they request run in tasks of the session.
    """

    def __init__(self, task: str, changed: Changed) -> None:
        self.task = task
        self.phase = Phase.OPENING
        self.status_message = ""
        self.error = ""
        self.episode: Episode | None = None
        self.calls: list[ToolCall] = []
        self.verdict: Verdict | None = None
        self.failed_verdict: JsonObject | None = None
        self.closed = False
        self.started = anyio.current_time()
        self._changed = changed
        self._numbers = itertools.count(1)
        self._tasks: TaskGroup | None = None
        self._scope = anyio.CancelScope()

    @property
    def running(self) -> list[ToolCall]:
        """Calls without a reply yet."""
        return [call for call in self.calls if call.running]

    def call(self, tool: str, arguments: JsonObject) -> ToolCall:
        """Start a tool call; returns at once."""
        assert self._tasks is not None, "called before it is ready"
        call = ToolCall(next(self._numbers), tool, arguments, anyio.current_time())
        self.calls.append(call)
        self._tasks.start_soon(self._call, call)
        self._changed(self, call)
        return call

    def claim(self, answer: str | None) -> None:
        """Claim the attempt and evaluate it."""
        if self._tasks is not None and self.phase is Phase.PLAYING:
            self._enter_phase(Phase.GRADING)
            self._tasks.start_soon(self._grade, answer)

    def leave(self) -> None:
        """End the episode. A claimed attempt is still graded."""
        self._scope.cancel()

    async def run(self, d: Decathlon) -> None:
        """Open the episode and own it until `leave`."""
        try:
            with self._scope:
                async with (
                    d.episode(self.task, on_progress=self._opening) as self.episode,
                    anyio.create_task_group() as self._tasks,
                ):
                    self._enter_phase(Phase.PLAYING)
                    await anyio.sleep_forever()
        except ClientError as error:
            self._fail(error)
        finally:
            self.closed = True

    async def _opening(self, progress: float, total: float | None, message: str | None) -> None:
        self.status_message = message or ""
        self._changed(self, None)

    async def _call(self, call: ToolCall) -> None:
        assert self.episode is not None

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            call.progress = (progress, total, message)
            self._changed(self, call)

        try:
            with call.scope:
                call.reply = await self.episode.call(call.tool, call.arguments, on_progress=on_progress)
        except ClientError as error:
            call.error = error.message
            if isinstance(error, (EpisodeEndedError, SandboxLostError)) and self.phase is Phase.PLAYING:
                self._fail(error)
        call.finished = anyio.current_time()
        call.cancelled = call.scope.cancelled_caught
        self._changed(self, call)

    async def _grade(self, answer: str | None) -> None:
        assert self.episode is not None
        try:
            reply = await self.episode.claim_done(answer)
            if reply.is_error:
                self.status_message = reply.text
            self.verdict = await self.episode.evaluate(on_progress=self._opening)
        except NoVerdictError as error:
            self.failed_verdict = error.verdict
            self._fail(error)
        except ClientError as error:
            self._fail(error)
        else:
            self._enter_phase(Phase.SCORED)

    def _fail(self, error: ClientError) -> None:
        self.error = error.message
        self._enter_phase(Phase.OVER)

    def _enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.status_message = ""
        self._changed(self, None)


class SessionManager:
    """Starts attempts on one server."""

    def __init__(self, d: Decathlon, tasks: TaskGroup) -> None:
        self._d = d
        self._tasks = tasks

    async def tasks(self) -> list[Task]:
        """All tasks, with their prompts."""
        return await self._d.tasks()

    async def require(self, task: str) -> None:
        """Check that a task exists. Raises UnknownTaskError with the server's suggestions."""
        if not any(known.id == task for known in await self._d.tasks(prompts=False)):
            # Only the server can suggest similar ids: let it refuse.
            async with self._d.episode(task):
                return

    def start(self, task: str, changed: Changed) -> PlaySession:
        """Start an attempt. Failures are reported in its `error`."""
        session = PlaySession(task, changed)
        self._tasks.start_soon(session.run, self._d)
        return session


@asynccontextmanager
async def open_sessions(d: Decathlon) -> AsyncGenerator[SessionManager]:
    """Connect to the server; every attempt ends with the body. Raises ClientError if it is unreachable."""
    async with d, background_tasks() as tasks:
        yield SessionManager(d, tasks)


def format_duration(value: Any) -> str:
    """Seconds as `mm:ss` or `h:mm:ss`."""
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
