"""Background tasks that run as long as a body, and the time that closing them may take."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from decathlon_client.client_errors import ConnectionLostError

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


class OwnedContext(Generic[T]):
    """A context that one task, `run`, enters and leaves; users in any task wait for both.

    Once it is entered, no scope around its task cancels it: what its user does to close still needs it.
    """

    # asyncio's cancellation, unlike anyio's, goes through every shield. In the user's task it would lose an
    # episode that the server is starting, or its closing. And anyio's scopes must be left in the task that
    # entered them.

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._values: list[T] = []
        self._error: Exception | None = None
        self._scope = CancelScope()
        self._ready = anyio.Event()
        self._left = anyio.Event()
        self._closed = anyio.Event()

    async def run(self) -> None:
        """Enter the context, and leave it once `leave` was called."""
        try:
            with self._scope:
                async with self._context as value:
                    self._values.append(value)
                    self._scope.shield = True
                    self._ready.set()
                    await self._left.wait()
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

    async def opened(self) -> T:
        """As `entered`; where that fails or is cancelled, the context is left first."""
        try:
            return await self.entered()
        except BaseException:
            with CancelScope(shield=True):
                await self.aclose()
            raise

    def leave(self) -> None:
        """Let the context be left, as soon as it is entered."""
        self._left.set()

    def cancel(self) -> None:
        """Cancel what is in progress: entering the context, its life, or what it does to close."""
        self._scope.cancel()

    async def aclose(self) -> None:
        """Wait until the context is left, which goes on if this is cancelled. Entering it is cancelled."""
        if not self._values:
            self.cancel()
        self.leave()
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

    def cancel(self) -> None:
        """Cancel all contexts."""
        for owned in self._running:
            owned.cancel()


@asynccontextmanager
async def owned_contexts() -> AsyncGenerator[OwnedContexts]:
    """Contexts that are cancelled when the body ends, and not before; all are left then."""
    async with background_tasks() as tasks:
        owned = OwnedContexts(tasks)
        try:
            yield owned
        finally:
            owned.cancel()


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
