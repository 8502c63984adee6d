"""Tasks that run as long as a block of code, work that ends whatever cancels its caller, and events.

Decided 2026-11-24: work that is tried again is a loop where it stands. No two such loops in providers and
recovery end alike (at a deadline, after a number of tries, when an engine is silent or a container is kept):
a helper, or tenacity, takes more lines than it replaces.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import cast

import anyio
import anyio.lowlevel
from anyio import CancelScope
from anyio.abc import TaskGroup
from decathlon_client.task_groups import background_tasks as background_tasks

try:
    from sniffio import current_async_library_cvar as _library
except ImportError:
    _library = None

RESTART_SECONDS = 1.0
"""Time between the failure of work in the background and its next begin."""

_log = logging.getLogger("decathlon.background")


def name_event_loop() -> None:
    """Let callbacks that are registered after this in the same context start tasks of a task group."""
    # Where sniffio is installed, which other packages need, anyio asks it for the library. Outside of a task
    # it knows only this variable. `anyio.run` sets it. `asyncio.run`, in a program that embeds a server, does
    # not: then a long reply ended its episode.
    if _library is not None:
        _library.set("asyncio")


class LazyTimer:
    """Calls a function at a time that may be set again and again, mostly to a later time.

    Times are by the event loop's clock.
    """

    # A timer of the event loop costs more than most of what a call needs. So this timer is left as it is
    # while its time becomes later.
    __slots__ = ("_at", "_call", "_handle", "_rings_at")

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._at = self._rings_at = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        """Call the function then, instead of at an earlier or later time; infinity: never."""
        self._at = at
        if at < self._rings_at:
            if self._handle is not None:
                self._handle.cancel()
            self._rings_at = at
            name_event_loop()
            self._handle = asyncio.get_running_loop().call_at(at, self._ring)

    def stop(self) -> None:
        """Do not call the function any more, until the next `set`."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at, self._rings_at = None, math.inf, math.inf

    def _ring(self) -> None:
        self._handle, self._rings_at = None, math.inf
        if self._at <= asyncio.get_running_loop().time():
            self._at = math.inf
            self._call()
        else:
            self.set(self._at)


class Flag:
    """An event, as anyio's: set once, for any number of tasks."""

    # An episode has a dozen, for most of which nobody waits. Anyio's weigh 0.8 KiB each.
    __slots__ = ("_callbacks", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: list[Callable[[], object]] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the flag, wake the tasks that wait for it, and call the callbacks."""
        self._is_set = True
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the flag is set; now, if it is."""
        if self._is_set:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], object]) -> None:
        """Do not call `callback` any more."""
        if self._callbacks is not None:
            self._callbacks.remove(callback)

    async def wait(self) -> None:
        """Wait until the flag is set."""
        if self._is_set:
            return
        future = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.on_set(wake)
        try:
            await future
        finally:
            self.forget(wake)


async def run_alone(work: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Run `work` in a task group, or an exit stack, whose other parts do not depend on it.

    If it fails, that is logged. Its exception would end whatever else runs in the group, which is often the
    whole server, or replace the error that unwinds the stack.
    """
    try:
        await work(*arguments)
    except Exception:  # noqa: BLE001
        _log.exception("work in the background failed")
    except (asyncio.CancelledError, BaseExceptionGroup) as error:
        task = asyncio.current_task()
        if _ends_the_process(error) or (task is not None and task.cancelling()):
            raise
        # Raises again if a scope around this task is cancelled. Otherwise something was cancelled that `work`
        # waited for, and the group would end without a word: it takes that for the end of its own scope.
        await anyio.lowlevel.checkpoint_if_cancelled()
        _log.exception("work in the background was cancelled, although nothing has cancelled its task group")


def _ends_the_process(error: BaseException) -> bool:
    """Whether an error is, or contains, one that is meant for the whole process (KeyboardInterrupt)."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return any(map(_ends_the_process, inner))
    return not isinstance(error, Exception | asyncio.CancelledError)


def in_any_case(*steps: Callable[[], object]) -> None:
    """Take each step, also after a step that failed. Failures are logged."""
    for step in steps:
        try:
            step()
        except Exception:  # noqa: BLE001
            _log.exception("a step of an end failed; the others happen")


async def run_for_ever(work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` until it is cancelled: `run_alone`, again and again."""
    while True:
        await run_alone(work)
        await anyio.sleep(RESTART_SECONDS)


async def finish(tasks: TaskGroup, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` to its end, as a task of the group, and wait for it.

    It is neither cancelled with its caller nor with the group. `work` must end by itself. If it fails, that
    is logged: neither the caller nor the group ends with it.
    """
    # A shield alone is not enough: asyncio's own `Task.cancel`, which frameworks and `asyncio.run` call,
    # ignores anyio's shields. It ends the waiting here, and nothing else.
    finished = anyio.Event()

    async def run() -> None:
        with CancelScope(shield=True):
            try:
                await run_alone(work)
            finally:
                finished.set()

    tasks.start_soon(run)
    with CancelScope(shield=True):
        await finished.wait()
