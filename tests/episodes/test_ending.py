"""The end of an episode: each step of it happens, whatever has become of the one before."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes import runner as runner_module
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from tests.episodes.environment import TOOLS, ended, exits_with, make_call, running_registry
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio
PLAYER = Principal()
END_SECONDS = 20.0


async def test_episode_ends_although_its_archives_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, *, ignore_errors: bool) -> None:
        raise RuntimeError("can't start new thread")

    async with running_registry(tmp_path, FakeProvider(tools=TOOLS, run=exits_with(0))) as registry:
        episode = registry.start("find-answer", PLAYER)
        await episode.ready()
        # As for folders that are too deep: a real one would stay after the test.
        monkeypatch.setattr(runner_module.shutil, "rmtree", fail)
        episode.close()
        with anyio.fail_after(END_SECONDS):
            await ended(episode)
        monkeypatch.undo()
        assert episode.state.ending is Ending.CLOSED
        assert episode.verdict is not None
        with pytest.raises(Exception, match="its client left before grading"):
            await make_call(episode, "probe__echo", CallParams.of({}))


async def test_episode_ends_although_every_thread_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "REMOVAL_SECONDS", 0.1)
    limiter = anyio.to_thread.current_default_thread_limiter()
    busy = [object() for _ in range(int(limiter.total_tokens))]
    async with running_registry(tmp_path, FakeProvider(tools=TOOLS, run=exits_with(0))) as registry:
        episode = registry.start("find-answer", PLAYER)
        await episode.ready()
        for borrower in busy:
            await limiter.acquire_on_behalf_of(borrower)
        try:
            episode.close()
            with anyio.fail_after(END_SECONDS):
                await ended(episode)
        finally:
            for borrower in busy:
                limiter.release_on_behalf_of(borrower)
    assert episode.verdict is not None
