"""Cancellation by asyncio: a player's own is its failure, and that of an opening leaves no episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import pytest
from decathlon_client import Batch, Decathlon, Episode, ManagedEpisode

from decathlon_mcp.episodes.state import Phase
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

LEFT_SECONDS = 60.0
"""A sandbox that was left ends after 300 s."""


async def cancelled_task() -> asyncio.Task[None]:
    task = asyncio.create_task(asyncio.sleep(100))
    await asyncio.sleep(0)
    task.cancel()
    return task


async def raises(e: Episode) -> None:
    raise asyncio.CancelledError


async def gathers_a_cancelled_task(e: Episode) -> None:
    await asyncio.gather(e.call("probe__echo", {"text": "x"}), await cancelled_task())


@pytest.mark.parametrize("cancelled", [raises, gathers_a_cancelled_task])
async def test_a_player_that_is_cancelled_by_its_own_doing_has_failed(
    served: Served, cancelled: Callable[[Episode], Awaitable[None]]
) -> None:
    started = 0

    async def player(e: Episode) -> None:
        nonlocal started
        started += 1
        if started % 2:
            await cancelled(e)
        await e.act("probe__write", {"path": "answer.txt", "text": "42"})

    async with (
        Decathlon(served.url) as d,
        d.batch(["find-answer"] * 6, concurrency=3, progress=False) as batch,
    ):
        results = [result async for result in batch.run(player)]
    assert sorted(result.index for result in results) == list(range(6))
    failed = [result for result in results if result.verdict is None]
    assert [result.fault for result in failed] == ["player"] * 3
    assert all(isinstance(result.failure and result.failure.__cause__, RuntimeError) for result in failed)
    assert [result.reward for result in results if result.verdict] == [1.0] * 3
    assert (batch.tally.scored, batch.tally.broken) == (3, 3)


async def test_a_cancelled_consumer_cancels_its_players(served: Served) -> None:
    playing, reached = anyio.Event(), list[BaseException]()

    async def player(e: Episode) -> None:
        playing.set()
        try:
            await asyncio.sleep(100)
        except BaseException as error:
            reached.append(error)
            raise

    async def consume(batch: Batch) -> None:
        async for result in batch.run(player):
            raise AssertionError(result)

    async def play() -> None:
        async with (
            Decathlon(served.url) as d,
            d.batch(["find-answer"] * 3, concurrency=1, progress=False) as b,
        ):
            await consume(b)

    before: set[object] = set(served.episodes.live)
    task = asyncio.create_task(play())
    await playing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(error) for error in reached] == [asyncio.CancelledError]
    await no_more_than(served, before)


async def no_more_than(served: Served, before: set[object]) -> None:
    """Wait until the server has no other live episodes."""
    with anyio.fail_after(LEFT_SECONDS):
        for episode in list(served.episodes.live):
            if episode not in before:
                await episode.state.reach(Phase.ENDED)


async def cancel_twice(playing: Coroutine[Any, Any, None], n: int) -> None:
    """Cancel a task twice, at moments that differ for each `n`."""
    task = asyncio.create_task(playing)
    await asyncio.sleep(0.02 * n)
    task.cancel()
    await asyncio.sleep(0.004 * (n % 5))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def play_an_episode(url: str) -> None:
    async with Decathlon(url) as d, d.episode("find-answer"):
        await asyncio.sleep(100)


async def play_a_managed_episode(url: str) -> None:
    managed = await ManagedEpisode.open("find-answer", url=url)
    try:
        await asyncio.sleep(100)
    finally:
        await managed.close()


@pytest.mark.parametrize("play", [play_an_episode, play_a_managed_episode])
async def test_openings_that_are_cancelled_twice_leave_no_episode(
    served: Served, play: Callable[[str], Coroutine[Any, Any, None]]
) -> None:
    before: set[object] = set(served.episodes.live)
    await asyncio.gather(*(cancel_twice(play(served.url), n) for n in range(10)))
    await no_more_than(served, before)
