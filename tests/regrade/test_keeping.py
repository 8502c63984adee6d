"""What is kept of an episode for a later grading, and what that must never cost."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.plugins.regrade.kept_attempts import AttemptFiles
from decathlon_mcp.plugins.regrade.regrading import read_kept
from decathlon_mcp.storage.disk import DiskSpace
from tests.episodes.environment import TOOLS, exits_with, make_call, running_registry, suite_with
from tests.fakes.driver import FakeRun
from tests.fakes.provider import FakeProvider

pytestmark = pytest.mark.anyio

CLIENT = Principal()
KEPT = {"attempt.json", "workspace.tar.gz"}
SEALED = {"sealed.tar.gz", "sealed.json"}


def kept_names(episode: Episode) -> set[str]:
    names = {path.name for path in episode.files.folder.iterdir()}
    return names - {"trajectory.jsonl", "verdict.json", "traj_log.json", "eval_res.json", ".verdict.reserved"}


async def test_everything_is_there_when_the_evaluator_starts(tmp_path: Path) -> None:
    seen: list[set[str]] = []
    episodes: list[Episode] = []

    def run(request: FakeRun) -> int:
        if "--groundtruth_workspace" in request.argv:
            seen.append(kept_names(episodes[0]))
        return 0

    provider = FakeProvider(tools=TOOLS, run=run)
    async with running_registry(tmp_path, provider, keep="workspace") as registry:
        episodes.append(registry.start("made-answer", CLIENT))
        await make_call(episodes[0], "probe__echo", CallParams.of({"text": "x"}))
        await episodes[0].claim_done("the answer", turns=3)
        verdict = await episodes[0].evaluate()
    assert seen == [KEPT | SEALED]
    folder = episodes[0].files.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {(folder / name).stat().st_mode & 0o777 for name in KEPT | SEALED} == {0o600}
    kept = read_kept(folder)
    assert (kept.attempt.answer, kept.attempt.turns) == ("the answer", 3)
    assert (kept.sealed, kept.in_place) == (True, False)
    assert kept.attempt.counts == {name: verdict.metrics[name] for name in kept.attempt.counts}
    assert list(kept.attempt.tools) == ["probe"]


async def test_nothing_is_kept_on_a_nearly_full_disk_and_the_verdict_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_registry(
        tmp_path, FakeProvider(tools=TOOLS, run=exits_with(0)), keep="workspace"
    ) as registry:
        episode = registry.start("made-answer", CLIENT)
        await episode.ready()
        assert kept_names(episode) == SEALED
        episode.files.disk = DiskSpace(tmp_path, 1 << 60)
        with caplog.at_level(logging.WARNING):
            verdict = await episode.evaluate()
    assert (verdict.status, verdict.reward) == ("scored", 1.0)
    assert kept_names(episode) == set()
    assert "the attempt could not be kept for a later grading" in caplog.text


async def test_a_task_folder_over_the_workspace_limit_is_not_kept(tmp_path: Path) -> None:
    suite = suite_with(tmp_path)
    (suite / "tasks/probe/made-answer/groundtruth_workspace/big").write_bytes(os.urandom(3 << 20))
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(
        tmp_path, provider, suite=suite, keep="workspace", workspace_mib=1
    ) as registry:
        episode = registry.start("made-answer", CLIENT)
        assert (await episode.evaluate()).reward == 1.0
    assert kept_names(episode) == set()


async def test_the_log_of_what_could_not_be_kept_has_no_handle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(files: AttemptFiles, source: Path, name: str, limit_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(files.folder / name))

    monkeypatch.setattr(AttemptFiles, "keep_archive", fail)
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, keep="workspace") as registry:
        episode = registry.start("made-answer", CLIENT)
        with caplog.at_level(logging.WARNING):
            assert (await episode.evaluate()).reward == 1.0
    (warning, *_) = (record for record in caplog.records if "could not be kept" in record.message)
    assert "No space left on device" in str(vars(warning))
    assert episode.id not in str(vars(warning))
