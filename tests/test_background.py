"""Work that is finished whatever cancels its caller, or that begins again."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from decathlon_mcp import background
from decathlon_mcp.background import (
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
