"""Tasks that run as long as a block of code, work that ends whatever cancels its caller, and signals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup


class Signal:
    """Wakes the one task that waits for it, any number of times."""

    # A call needs several. An event of anyio's costs ten times as much, and serves once.
    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task that waits, or the next one that will."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the signal has been set since the last wait."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """A task group whose tasks are cancelled when the body ends."""
    # An exception of the body is raised outside the task group, which would wrap it in an ExceptionGroup.
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def finish(tasks: TaskGroup, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` to its end, as a task of the group, and wait for it.

    It is neither cancelled with its caller nor with the group. `work` must not raise and must end by itself.
    """
    # A shield alone is not enough: asyncio's own `Task.cancel`, which frameworks and `asyncio.run` call,
    # ignores anyio's shields. It ends the waiting here, and nothing else.
    finished = anyio.Event()

    async def run() -> None:
        with CancelScope(shield=True):
            try:
                await work()
            finally:
                finished.set()

    tasks.start_soon(run)
    with CancelScope(shield=True):
        await finished.wait()
