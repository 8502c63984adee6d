"""Work that is finished whatever cancels its caller."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from decathlon_mcp.background import background_tasks, finish

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
