"""Work that is finished whatever cancels its caller, events, and timers."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest

from decathlon_mcp import background
from decathlon_mcp.background import (
    Flag,
    LazyTimer,
    background_tasks,
    finish,
    run_alone,
    run_for_ever,
)

pytestmark = pytest.mark.anyio


async def test_work_is_finished_though_its_caller_is_cancelled_by_asyncio() -> None:
    begun, may_end, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        ended.set()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            caller = asyncio.create_task(finish(tasks, work))
            await begun.wait()
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            assert not ended.is_set()
            may_end.set()
            await ended.wait()


async def test_work_is_finished_before_its_group_ends() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        await anyio.lowlevel.checkpoint()
        ended = True

    with anyio.fail_after(10):
        async with background_tasks() as tasks:
            caller = asyncio.create_task(finish(tasks, work))
            await asyncio.sleep(0)
        await caller
    assert ended


async def test_a_cancelled_scope_waits_until_work_is_finished() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        await anyio.lowlevel.checkpoint()
        ended = True

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await finish(tasks, work)
                assert ended


async def test_a_flag_wakes_every_task_and_calls_every_callback_once() -> None:
    flag, called = Flag(), list[str]()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(flag.wait)
            with anyio.move_on_after(0.01):
                await flag.wait()  # a task that is cancelled is forgotten
            flag.on_set(lambda: called.append("before"))
            await anyio.wait_all_tasks_blocked()
            assert not flag.is_set()
            flag.set()
            flag.set()
        flag.on_set(lambda: called.append("after"))
        await flag.wait()
    assert flag.is_set()
    assert called == ["before", "after"]


class Rung:
    """Waits for calls of `ring`, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._event = anyio.Event()

    def ring(self) -> None:
        self.count += 1
        self._event.set()

    async def wait(self) -> None:
        with anyio.fail_after(10):
            await self._event.wait()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_lazy_timer_calls_once_its_latest_time_has_come() -> None:
    rung = Rung()
    timer = LazyTimer(rung.ring)
    timer.set(now() + 0.02)
    timer.set(later := now() + 0.2)
    await rung.wait()
    assert later <= now()
    assert rung.count == 1


async def test_a_lazy_timer_can_be_set_to_an_earlier_time() -> None:
    rung = Rung()
    timer = LazyTimer(rung.ring)
    timer.set(now() + 3600)
    timer.set(now() + 0.02)
    await rung.wait()
    await anyio.sleep(0.05)
    assert rung.count == 1


async def test_a_lazy_timer_that_has_no_time_any_more_does_not_call_until_it_is_set_again() -> None:
    rung = Rung()
    timer = LazyTimer(rung.ring)
    timer.set(now() + 0.02)
    timer.set(math.inf)
    await anyio.sleep(0.1)
    timer.set(now() + 0.02)
    timer.stop()
    await anyio.sleep(0.1)
    assert rung.count == 0
    timer.set(now() + 0.02)
    await rung.wait()
    timer.set(now() + 0.02)
    await anyio.sleep(0.1)
    assert rung.count == 2


async def test_work_that_fails_begins_again_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "RESTART_SECONDS", 0.01)
    begun, again = 0, anyio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun == 3:
            again.set()
            await anyio.sleep_forever()
        raise ValueError("broken")

    with anyio.fail_after(10):
        async with background_tasks() as tasks:
            tasks.start_soon(run_for_ever, work)
            await again.wait()
    assert caplog.text.count("ValueError: broken") == 2


async def test_work_that_waits_for_something_cancelled_does_not_end_its_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = anyio.Event()

    async def work() -> None:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        try:
            await cancelled
        finally:
            ended.set()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_alone, work)
            await ended.wait()
            await anyio.wait_all_tasks_blocked()
            await anyio.lowlevel.checkpoint()
    assert not tasks.cancel_scope.cancel_called
    assert "nothing has cancelled its task group" in caplog.text


async def test_work_that_is_cancelled_with_its_group_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(10):
        async with background_tasks() as tasks:
            tasks.start_soon(run_alone, anyio.sleep_forever)
            tasks.start_soon(run_for_ever, anyio.sleep_forever)
            await anyio.wait_all_tasks_blocked()
    assert not caplog.text
