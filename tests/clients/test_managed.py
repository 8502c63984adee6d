"""Managed episodes, which one hook of a framework opens and another closes."""

from __future__ import annotations

import asyncio

import pytest
from decathlon_client import ManagedEpisode

from decathlon_mcp.episodes.state import Phase
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


async def test_a_managed_episode_is_opened_and_closed_in_different_tasks(served: Served) -> None:
    managed = await asyncio.create_task(ManagedEpisode.open("find-answer", url=served.url))
    episode = next(each for each in served.episodes.live if each.id == managed.episode.id)
    await managed.episode.act("probe__write", '{"path": "answer.txt", "text": "42"}')
    assert (await managed.episode.evaluate()).reward == 1.0
    await asyncio.create_task(managed.close())
    await managed.close()
    await episode.state.reach(Phase.ENDED)
