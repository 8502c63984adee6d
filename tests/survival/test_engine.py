"""Episodes whose Docker engine is killed and started again with live-restore."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from decathlon_client import Decathlon

from tests.sandboxes.own_engine import OwnEngine
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.long]


async def test_no_episode_is_lost_when_its_engine_restarts(own_engine: OwnEngine, tmp_path: Path) -> None:
    """Engine deaths while calls run, while a workspace is captured, and while attempts are graded."""
    rewards: list[float | None] = []
    runs: list[int] = []
    async with (
        supervised_server(tmp_path / "state", provider="docker") as server,
        Decathlon(server.url) as client,
    ):

        async def play() -> None:
            async with client.episode("find-answer") as episode:
                for _ in range(12):
                    await episode.call("probe__shell", {"command": "echo ran >> runs.txt; sleep 0.5"})
                runs.append(int((await episode.call("probe__shell", {"command": "wc -l < runs.txt"})).text))
                await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
                await episode.claim_done()
                rewards.append((await episode.evaluate()).reward)

        async with anyio.create_task_group() as players:
            for _ in range(4):
                players.start_soon(play)
            await anyio.sleep(4)
            for _ in range(4):
                await own_engine.kill()
                await anyio.sleep(0.5)
                await own_engine.start()
                await anyio.sleep(1.5)
    assert rewards == [1.0] * 4
    assert runs == [12] * 4
    assert await own_engine.containers() == []
