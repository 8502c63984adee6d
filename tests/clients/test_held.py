"""An episode that one hook of a framework opens and another closes."""

from __future__ import annotations

import asyncio

import pytest
from decathlon_client import SetUpError
from decathlon_client.held import HeldEpisode

from decathlon_mcp.model import Phase
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


async def test_it_may_be_opened_and_closed_in_different_tasks(served: Served) -> None:
    held = await asyncio.create_task(HeldEpisode.open(served.url, "find-answer"))
    episode = next(each for each in served.episodes.live if each.id == held.episode.id)
    await held.episode.act("probe__write", '{"path": "answer.txt", "text": "42"}')
    assert (await held.episode.evaluate()).reward == 1.0
    await asyncio.create_task(held.close())
    await held.close()
    await episode.state.reach(Phase.ENDED)


async def test_what_does_not_open_is_said_to_who_asked(served: Served) -> None:
    with pytest.raises(SetUpError):
        await HeldEpisode.open(served.url, "failing-preprocess", options={"tries": 1})


async def test_who_is_cancelled_while_it_opens_leaves_none(served: Served) -> None:
    before = set(served.episodes.live)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(HeldEpisode.open(served.url, "late-server"), 0.5)
    for episode in set(served.episodes.live) - before:
        await episode.state.reach(Phase.ENDED)
