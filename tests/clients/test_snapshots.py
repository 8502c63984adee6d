"""Branches from states of episodes that were saved, on sandboxes of gVisor."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from decathlon_client import Decathlon, EpisodeEndedError, NotRunnableError, RequestError, SetUpError

from decathlon_mcp.plugins.regrade.kept_attempts import KEPT_SEALED, ORIGINAL_FILE
from tests.probe.serving import SUITE, folder_of

pytestmark = [pytest.mark.anyio, pytest.mark.docker]
NEXT_UUID = {"command": "python3 -c 'import uuid; print(uuid.uuid4())'"}
CHANGING = ("episode", "started_at", "claimed_at", "scored_at", "seconds", "signature", "metrics", "branch")
"""Members of verdicts that differ from episode to episode."""
IDS = {"operation", "session", "event_id"}


@pytest.fixture
async def d(tmp_path: Path, runsc: str, unpacked_image: str) -> AsyncGenerator[Decathlon]:
    settings: dict[str, Any] = {"image": unpacked_image, "state": tmp_path, "drain_seconds": 5}
    settings["keep"] = "workspace"
    async with Decathlon.embedded(SUITE, "host", kernel="gvisor", snapshots_kept=2, **settings) as d:
        yield d


def lines(state: Path, episode: str, event: str) -> list[dict[str, Any]]:
    text = (folder_of(state, episode) / "trajectory.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


async def test_branches_are_copies_of_the_state_that_was_saved(d: Decathlon, tmp_path: Path) -> None:
    async with d.episode("find-answer", snapshots=3) as e:
        first = (await e.call("probe__shell", NEXT_UUID)).text
        assert (await e.call("probe__fail")).is_error
        await e.call("probe__shell", {"command": "echo 41 > answer.txt"})
        await e.call("probe__shell", {"command": "echo 42 > answer.txt"})
        assert await d.snapshot(e) == 4
        verdicts: list[Any] = []
        # Made again, the first call would have another reply.
        async with d.branch(e, at=3, count=3) as branches:
            assert [slot.failure for slot in branches] == [None] * 3
            for number, slot in enumerate(branches):
                b = slot.episode
                assert (await b.call("probe__read", {"path": "answer.txt"})).text == "41\n"
                await b.call("probe__write", {"path": "answer.txt", "text": str(41 + number)})
                await b.claim_done()
                verdicts.append(await b.evaluate())
        assert (await e.call("probe__read", {"path": "answer.txt"})).text == "42\n"
        assert await d.snapshot(e) == 5
        folder = folder_of(tmp_path, e.public_id) / "snapshots"
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["4", "5"]
        # A claim does not wait for a state that is being saved.
        await e.claim_done()
        whole = await e.evaluate()
    assert [verdict.reward for verdict in (whole, *verdicts)] == [1.0, 0.0, 1.0, 0.0]
    assert {**whole.raw, **dict.fromkeys(CHANGING)} == {**verdicts[1].raw, **dict.fromkeys(CHANGING)}
    assert whole.raw["suite_revision"]
    assert whole.raw["image_digest"]
    for verdict in verdicts:
        assert (verdict.metrics["calls"], verdict.metrics["failed_calls"]) == (5, 1)
        assert verdict.raw["branch"] == {"episode": e.public_id, "at": 3, "differences": 0, "exact": True}
        calls = lines(tmp_path, verdict.raw["episode"], "call")
        assert [(call["seq"], call.get("replayed", False)) for call in calls] == [
            (1, True),
            (2, True),
            (3, True),
            (4, False),
            (5, False),
        ]
        # By the ids of its requests, a client finds a call in the episode in which it was made.
        assert not calls[0].keys() & IDS
        replies = lines(tmp_path, verdict.raw["episode"], "reply")
        assert replies[0]["result"]["content"][0]["text"] == first
    assert lines(tmp_path, whole.raw["episode"], "call")[0].keys() & IDS


async def test_the_calls_after_the_newest_state_are_made_again(d: Decathlon, tmp_path: Path) -> None:
    async with d.episode("made-answer") as e:
        await e.call("probe__shell", NEXT_UUID)
        assert await d.snapshot(e) == 1
        assert await d.snapshot(e) == 1
        await e.call("probe__shell", {"command": "echo 1 >> runs.txt; cat runs.txt"})
        await e.call("probe__shell", {"command": "echo 2 >> runs.txt; cat runs.txt"})
        async with d.branch(e, at=3) as b:
            # A copy of a copy, with what preprocess has left for the evaluator.
            assert await d.snapshot(b) == 3
            async with d.branch(b, at=3) as c:
                await c.call("probe__shell", {"command": "echo 3 >> runs.txt; cat runs.txt"})
                assert (await c.call("probe__read", {"path": "runs.txt"})).text == "1\n2\n3\n"
                await c.call("probe__shell", {"command": "echo made-by-preprocess > answer.txt"})
                exact = await c.evaluate()
            replayed = await b.evaluate()
        with pytest.raises((RequestError, EpisodeEndedError), match=r"not open|is over"):
            await d.snapshot(b)
    assert exact.reward == 1.0
    assert replayed.raw["branch"] == {"episode": e.public_id, "at": 3, "differences": 0}
    assert exact.raw["branch"] == {"episode": b.public_id, "at": 3, "differences": 0, "exact": True}
    assert exact.metrics["calls"] == 6
    # What `regrade` needs, as if preprocess had run in the copy.
    source, *others = (
        folder_of(tmp_path, public_id) for public_id in (e.public_id, b.public_id, exact.raw["episode"])
    )
    for folder in others:
        for name in (ORIGINAL_FILE, KEPT_SEALED):
            assert (folder / name).exists()
        assert (folder / ORIGINAL_FILE).read_bytes() == (source / ORIGINAL_FILE).read_bytes()
    # The state outlives its episode, and one that is damaged costs time only.
    async with d.branch(e.id, at=1):
        pass
    (pages,) = (folder_of(tmp_path, e.public_id) / "snapshots" / "1").glob("pages.img")
    pages.write_bytes(pages.read_bytes()[:-1])
    with pytest.raises(SetUpError, match=r"call 1 \(probe__shell\) .* identifier: "):
        async with d.branch(e.id, at=1):
            pass


async def test_where_states_cannot_be_saved_that_is_said(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"isolation": "none", "state": tmp_path, "drain_seconds": 5}
    async with Decathlon.embedded(SUITE, "host", **settings) as d:
        with pytest.raises(NotRunnableError, match=r"provider host cannot be saved; use .* --kernel gvisor"):
            async with d.episode("find-answer", snapshots=1):
                pass
        async with d.episode("find-answer") as e:
            with pytest.raises(NotRunnableError, match="provider host cannot be saved"):
                await d.snapshot(e)
            # Without states, all calls are made again.
            await e.call("probe__write", {"path": "answer.txt", "text": "42"})
            async with d.branch(e, at=1, count=2) as branches:
                for slot in branches:
                    assert (await slot.episode.call("probe__read", {"path": "answer.txt"})).text == "42"
