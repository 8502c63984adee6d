"""Work that is finished whatever cancels its caller, and events."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from decathlon_mcp import background
from decathlon_mcp.background import Flag, Signal, background_tasks, finish, run_alone, run_for_ever

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


async def test_a_signal_wakes_its_task_each_time_it_is_set() -> None:
    signal = Signal()
    with anyio.fail_after(10):
        signal.set()
        await signal.wait()
        with anyio.move_on_after(0.01) as waiting:
            await signal.wait()
        assert waiting.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(signal.wait)
            await anyio.wait_all_tasks_blocked()
            signal.set()


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
