"""`replay`: what it plays, compares, marks and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon, Episode

from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.replay import DIFFERENT, EQUAL, NOT_PLAYED, ReplayOptions, replay_episode
from decathlon_mcp.settings import read_settings
from tests.probe.serving import SUITE, Served, folder_of, module_server

pytestmark = pytest.mark.anyio

UUID = "cat /proc/sys/kernel/random/uuid"


# With a store of its own, so that rows are there while episodes play.
served = module_server(provider="host", survives=True)


class Replays:
    """Replays episodes of a server on the same server, in this process."""

    def __init__(self, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
        self.served = served
        self._capsys = capsys

    async def run(self, episode: str, status: int, **options: Any) -> str:
        settings = read_settings({"state": self.served.state})
        found = await replay_episode(
            settings, episode, self.served.url, ReplayOptions(**options), embedded=False
        )
        output = self._capsys.readouterr()
        assert found == status, output
        return output.err if status == NOT_PLAYED else output.out

    async def report(self, episode: str, status: int, **options: Any) -> dict[str, Any]:
        return json.loads(await self.run(episode, status, as_json=True, **options))


@pytest.fixture
def replays(served: Served, capsys: pytest.CaptureFixture[str]) -> Replays:
    return Replays(served, capsys)


async def shell(e: Episode, command: str) -> str:
    return (await e.call("probe__shell", {"command": command})).text


async def test_an_episode_whose_replies_are_equal_is_replayed_to_the_same_verdict(
    served: Served, replays: Replays
) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer", labels={"run": "source"}) as e:
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await shell(e, "cat answer.txt; exit 3")
        await e.claim_done("42")
        await e.evaluate()
    lines = (await replays.run(e.public_id[:8], EQUAL, claim=True)).splitlines()
    assert lines[-4:] == [
        "    1  probe__write  equal",
        "    2  probe__shell  equal",
        "2 of 2 replies are equal",
        "the verdict was reward 1, and is reward 1",
    ]
    assert (await replays.report(e.id, EQUAL, to=1))["equal"] == 1
    history = EpisodeHistory([served.state])
    again = history.episodes(EpisodeQuery(labels={"replay_of": e.public_id}, with_branches=True)).items
    assert {each.is_derived for each in again} == {True}
    assert len(again) == 2
    report = history.run("source")
    assert report is not None
    assert report.summary.counts.episodes == 1


async def test_a_difference_is_shown_with_its_class_and_later_arguments_that_it_affects(
    served: Served, replays: Replays
) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        await shell(e, "echo same")
        uuid = (await shell(e, UUID)).strip()
        await shell(e, f"echo {uuid}")
        await shell(e, "date +%FT%T.%N")
    report = await replays.report(e.public_id, DIFFERENT)
    results = [(call["result"], call.get("difference", {}).get("class")) for call in report["calls"]]
    assert results == [("equal", None), ("differs", "identifier"), ("equal", None), ("differs", "time")]
    assert (report["equal"], report["different"], report["first_difference"]) == (2, 2, 2)
    difference = report["calls"][1]["difference"]
    assert difference["old"].strip() == difference["old_part"] == uuid
    assert report["calls"][2]["changed_arguments"] == [uuid]
    text = await replays.run(e.public_id, DIFFERENT, stop=True)
    assert f"\n       - [{uuid}]" in text
    assert text.endswith("1 of 2 replies are equal; the first that differs is that of call 2\n")


@pytest.mark.slow
async def test_cancelled_calls_are_named_and_not_sent_and_overlapping_ones_are_played_in_order(
    served: Served, replays: Replays
) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(e.call, "probe__sleep", {"seconds": 0.3})
            while served.find(e.id).calls.sent < 1:
                await anyio.lowlevel.checkpoint()
            await e.call("probe__echo", {"text": "meanwhile"})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(e.call, "probe__sleep", {"seconds": 600})
            while served.find(e.id).calls.sent < 3:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await e.call("probe__echo", {"text": "after"})
    report = await replays.report(e.public_id, EQUAL)
    assert [(call["result"], call.get("overlapped", False)) for call in report["calls"]] == [
        ("equal", True),
        ("equal", True),
        ("not sent: cancelled", False),
        ("equal", False),
    ]


@pytest.mark.slow
async def test_what_cannot_be_replayed_is_refused_with_its_reason(
    served: Served, replays: Replays, tmp_path: Path
) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        await e.call("probe__echo", {"text": "hello"})
    file = folder_of(served.state, e.public_id) / "trajectory.jsonl"
    recorded = file.read_text()

    async def refused_with(old: str, new: str) -> str:
        assert old in recorded
        file.write_text(recorded.replace(old, new))
        try:
            return await replays.run(e.public_id, NOT_PLAYED)
        finally:
            file.write_text(recorded)

    assert "the launch time of" in await refused_with('"launch_time":', '"other":')
    assert "has no tool probe__gone any more" in await refused_with('"probe__echo"', '"probe__gone"')
    assert "there is no task" in await refused_with('"task":"find-answer"', '"task":"gone"')
    language = await refused_with('"language":"en"', '"language":"cn"')
    assert "was played with the language cn, and this server has en" in language
    assert "there is no episode" in await replays.run("0" * 16, NOT_PLAYED)
    file.write_text(re.sub('"suite_revision":"[^"]*"', '"suite_revision":"abc"', recorded))
    (note,) = (await replays.report(e.public_id, EQUAL))["notes"]
    assert note.startswith("the suite's revision was abc, and is ")
    file.unlink()
    assert "cannot be read" in await replays.run(e.public_id, NOT_PLAYED)


@pytest.mark.slow
async def test_without_a_server_it_plays_in_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read_settings(
        {"suite": (SUITE,), "provider": "host", "isolation": "none", "state": tmp_path, "drain_seconds": 5}
    )
    options = {name: getattr(settings, name) for name in ("provider", "isolation", "state", "drain_seconds")}
    async with Decathlon.embedded(SUITE, names="raw", **options) as d, d.episode("find-answer") as e:
        await e.call("write", {"path": "answer.txt", "text": "42"})
        await e.call("shell", {"command": f"cat {e_workspace(e)}/answer.txt; pwd"})
    assert await replay_episode(settings, e.public_id, None, ReplayOptions(), embedded=True) == EQUAL
    lines = capsys.readouterr().out.splitlines()
    assert "calls are sent with the new path" in lines[1]
    assert lines[-1] == "2 of 2 replies are equal"


def e_workspace(e: Episode) -> str:
    (path,) = re.findall(r"(/\S+/workspace)\b", e.prompt)
    return path
