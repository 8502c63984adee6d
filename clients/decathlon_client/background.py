"""Background tasks that run as long as a body, and the time that closing them may take."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup, TaskStatus

INTERRUPTED_SECONDS = 3.5
"""Time to close everything after an interrupt, however much there is to close."""


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """A task group that is cancelled when the body ends; the body's own exception leaves unwrapped."""
    # A plain task group would wrap the body's exception in a group, which no caller's `except` matches.
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@contextmanager
def own_cancellations(what: str) -> Generator[None]:
    """Raise RuntimeError for a cancellation in the body that was not requested of this task.

    An example is the cancellation of another task for which the body waits. A task that ends with it counts
    as cancelled, and no error is reported.
    """
    task = asyncio.current_task()
    assert task is not None
    requests = task.cancelling()
    try:
        yield
    except asyncio.CancelledError as error:
        if task.cancelling() > requests or anyio.current_effective_deadline() == -math.inf:
            raise
        raise RuntimeError(f"{what} was cancelled, and not by this client") from error


class _ShieldOnStart(TaskStatus[None]):
    """Shields a scope once its task has started: one that is still starting must not outlive its starter."""

    def __init__(self, scope: CancelScope, status: TaskStatus[None]) -> None:
        self._scope = scope
        self._status = status

    def started(self, value: None = None) -> None:
        self._scope.shield = True
        self._status.started(value)


class ShieldedTasks:
    """Tasks that go on when a scope around `shielded_tasks` is cancelled, until its body has ended.

    What the body does to close, in scopes with a shield, still needs them.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._scopes: set[CancelScope] = set()

    async def start(self, function: Callable[..., Awaitable[None]]) -> None:
        """Run `function(task_status=...)` in a task, and wait until it has started. Raises its errors."""

        async def run(*, task_status: TaskStatus[None]) -> None:
            with CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    await function(task_status=_ShieldOnStart(scope, task_status))
                finally:
                    self._scopes.discard(scope)

        await self._tasks.start(run)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for scope in self._scopes:
            scope.cancel()


@asynccontextmanager
async def shielded_tasks() -> AsyncGenerator[ShieldedTasks]:
    """Tasks that are cancelled when the body ends, and not before."""
    async with background_tasks() as tasks:
        shielded = ShieldedTasks(tasks)
        try:
            yield shielded
        finally:
            shielded.cancel()


class ThreadInterrupted(Exception):  # noqa: N818
    """Ctrl-C in another thread, passed on to the event loop's thread."""


class CloseBudget:
    """The time that closing may take, shared by everything that is closed together."""

    def __init__(self) -> None:
        self._deadline = math.inf
        self._scopes: set[anyio.CancelScope] = set()

    @contextmanager
    def shield(self, seconds: float) -> Generator[anyio.CancelScope]:
        """Protect the body from cancellation for that long, or less after an interrupt."""
        deadline = min(anyio.current_time() + seconds, self._deadline)
        with anyio.CancelScope(deadline=deadline, shield=True) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def shorten(self, seconds: float = INTERRUPTED_SECONDS) -> None:
        """Limit everything that is being closed, or will be, to that long from now."""
        self._deadline = min(self._deadline, anyio.current_time() + seconds)
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self._deadline)

    @contextmanager
    def shorten_on_interrupt(self) -> Generator[None]:
        """Shorten the budget if the body is cancelled or interrupted."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                self.shorten()
            raise


def is_interrupt(error: BaseException | None) -> bool:
    """Whether the error is a cancellation or Ctrl-C."""
    kinds = (KeyboardInterrupt, ThreadInterrupted, anyio.get_cancelled_exc_class())
    return isinstance(error, kinds)
