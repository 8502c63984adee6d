"""What an episode records beside its calls: the first line, the line at READY, and the tools."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from hashlib import sha256
from typing import Any

import pytest

from decathlon_mcp import __version__
from decathlon_mcp.plugins.retention import remove_unnamed_tools
from tests.probe.clients import playing, start
from tests.probe.serving import Served, serving
from tests.storage.trajectories import events

pytestmark = pytest.mark.anyio

LAUNCH_TIME = "2026-03-01T12:00:00+00:00"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), provider="host") as served:
        yield served


def lines(served: Served, handle: str) -> list[dict[str, Any]]:
    return events(served.state / "episodes" / handle)


async def test_the_first_line_has_what_is_fixed_at_the_start_and_no_secret(served: Served) -> None:
    labels = {"run": "a", "step": "7"}
    started = await start(served, "find-answer", launch_time=LAUNCH_TIME, labels=labels, max_calls=9)
    head, *others = lines(served, started["episode"])
    assert {name: head[name] for name in ("event", "version", "suite", "task", "labels")} == {
        "event": "start",
        "version": 1,
        "suite": "probe",
        "task": "find-answer",
        "labels": labels,
    }
    assert (head["launch_time"], head["language"], head["names"]) == (LAUNCH_TIME, "en", "decathlon")
    assert (head["policy"], head["provider"], head["isolation"]) == ("visible", "host", "none")
    assert (head["limits"]["max_calls"], head["release"]) == (9, __version__)
    (ready,) = [line for line in others if line["event"] == "ready"]
    prompt = served.find(started["episode"]).prompt
    assert ready["prompt"] == {"system": prompt.system, "task": prompt.task}
    assert ready["suite_revision"]
    for secret in (started["episode"], started["agent"]):
        assert secret not in json.dumps([head, ready])


async def test_the_tools_are_kept_once_under_the_digest_of_their_content(served: Served) -> None:
    digests: list[str] = []
    offered: list[dict[str, Any]] = []
    for _ in range(2):
        async with playing(served, "find-answer", "task") as player:
            await player.call("probe__read", path="notes.txt")  # answered once the episode is ready
            offered = [
                tool.model_dump(mode="json", by_alias=True, exclude_unset=True)
                for tool in (await player.client.list_tools()).tools
            ]
            (ready,) = [line for line in lines(served, player.episode_id) if line["event"] == "ready"]
            digests.append(ready["tools"])
    (file,) = (served.state / "tools").iterdir()
    assert digests == [file.stem, file.stem]
    assert sha256(file.read_bytes()).hexdigest() == file.stem
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == [tool for tool in offered if tool["name"] != "evaluate"]


async def test_a_list_of_tools_is_removed_when_no_trajectory_names_it(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        await player.call("probe__read", path="notes.txt")
    (file,) = (served.state / "tools").iterdir()
    assert remove_unnamed_tools(served.state, time.time() + 1) == 0
    for trajectory in served.state.glob("episodes/*/trajectory.jsonl"):  # also those of the other tests
        trajectory.unlink()
    assert remove_unnamed_tools(served.state, time.time() - 60) == 0  # it was used since
    assert remove_unnamed_tools(served.state, time.time() + 1, dry_run=True) == 1
    assert file.exists()
    assert remove_unnamed_tools(served.state, time.time() + 1) == 1
    assert not file.exists()
    # The next episode with these tools writes the list again.
    await start(served, "find-answer")
    assert file.exists()
