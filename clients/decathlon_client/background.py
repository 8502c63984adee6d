"""Background tasks that run as long as a body, and the time that closing them may take."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup, TaskStatus

from decathlon_client.errors import ConnectionLostError

T = TypeVar("T")

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


class OwnedContext(Generic[T]):
    """A context that one task, `run`, enters and leaves; users in any task wait for both."""

    # asyncio's cancellation, unlike anyio's, goes through every shield. In the user's task it would lose an
    # episode that the server is starting, or its closing. And anyio's scopes must be left in the task that
    # entered them.

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._values: list[T] = []
        self._error: Exception | None = None
        self._scope = CancelScope()
        self._ready = anyio.Event()
        self._released = anyio.Event()
        self._closed = anyio.Event()

    async def run(self) -> None:
        """Enter the context, and leave it once it is released."""
        try:
            with self._scope:
                async with self._context as value:
                    self._values.append(value)
                    self._scope.shield = True
                    self._ready.set()
                    await self._released.wait()
        except Exception as error:  # noqa: BLE001
            self._error = error
        finally:
            self._ready.set()
            self._closed.set()

    @property
    def value(self) -> T:
        """What the context gave. Raises the error of entering it."""
        if not self._values:
            raise self._error or ConnectionLostError("this was closed")
        return self._values[0]

    async def entered(self) -> T:
        """Wait until the context is entered. Returns and raises as `value`."""
        await self._ready.wait()
        return self.value

    def release(self) -> None:
        """Let the context be left. One that is being entered is cancelled."""
        if not self._values:
            self._scope.cancel()
        self._released.set()

    async def aclose(self) -> None:
        """Release the context and wait until it is left; that goes on if this is cancelled."""
        self.release()
        await self._closed.wait()


class OwnedContexts:
    """Runs owned contexts."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._running: set[OwnedContext[Any]] = set()

    def own(self, context: AbstractAsyncContextManager[T]) -> OwnedContext[T]:
        """Enter a context in a task of its own."""
        owned = OwnedContext(context)

        async def run() -> None:
            await owned.run()
            self._running.discard(owned)

        self._running.add(owned)
        self._tasks.start_soon(run)
        return owned

    def release(self) -> None:
        """Let all contexts be left."""
        for owned in self._running:
            owned.release()


@asynccontextmanager
async def owned_contexts() -> AsyncGenerator[OwnedContexts]:
    """Contexts of which all are left on exit, however often the exit is cancelled."""
    async with background_tasks() as tasks:
        owned = OwnedContexts(tasks)
        try:
            yield owned
        finally:
            owned.release()


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
