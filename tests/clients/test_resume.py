"""Batches that are started again with the file of their verdicts, and the tools of a task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon, Episode, Result

from tests.probe.serving import Served, serving

SHORT_SECONDS, LONG_SECONDS = 20.0, 600.0
"""Of a group whose attempts never end, which have to be open within it, and of one whose attempts end."""
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def _play(
    served: Served, file: Path, tasks: list[str], fails: str = "", n: int = 1
) -> list[Result[str]]:
    async def player(e: Episode) -> str:
        if e.task == fails:
            raise LookupError("a bug in the player")
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.claim_done()
        return e.prompt

    async with (
        Decathlon(served.url) as d,
        d.batch(tasks, concurrency=2, n=n, progress=False, resume=file) as batch,
    ):
        results = [result async for result in batch.run(player)]
    assert batch.tally.scored == sum(result.reward is not None for result in results)
    return sorted(results, key=lambda result: result.index)


async def test_a_resumed_batch_plays_only_what_has_no_verdict(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    first = await _play(served, file, ["find-answer", "say-answer"], fails="say-answer")
    assert [(result.reward, result.resumed) for result in first] == [(1.0, False), (None, False)]
    # A process that is killed while it writes leaves half a line.
    file.write_bytes(file.read_bytes() + b'{"run": "x", "ta')
    second = await _play(served, file, ["find-answer", "say-answer", "find-answer"])
    assert [result.resumed for result in second] == [True, False, False]
    assert second[0].episode == first[0].episode
    assert second[0].verdict == first[0].verdict
    assert second[0].played is None
    third = await _play(served, file, ["find-answer", "find-answer", "say-answer"])
    assert all(result.resumed for result in third)
    assert {result.episode for result in third} == {result.episode for result in second}


async def test_the_rest_of_a_group_has_its_prompt_and_its_run(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    (first,) = await _play(served, file, ["find-answer"], n=1)
    file.write_text(
        file.read_text().replace('"launch_time": null', '"launch_time": "2026-01-02T03:04:05+00:00"')
    )
    results = await _play(served, file, ["find-answer"], n=2)
    assert [result.resumed for result in results] == [True, False]
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    assert '"launch_time": "2026-01-02T03:04:05+00:00"' in lines[1]
    assert first.verdict is not None
    assert lines[0].partition(", ")[0] == lines[1].partition(", ")[0]  # the run


async def test_another_file_is_refused_and_stays_as_it_is(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for text in ("my notes\n", "my notes"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"notes\.txt: line 1 is no verdict of a batch"):
            await _play(served, file, ["find-answer"])
        assert file.read_text() == text


async def test_what_was_dropped_is_played_when_the_batch_is_resumed(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"

    async def player(e: Episode) -> None:
        if e.task == "say-answer":
            await anyio.sleep_forever()

    async def play(tasks: list[str], seconds: float) -> list[Result[None]]:
        options: dict[str, Any] = {"group_seconds": seconds, "late": "drop", "resume": file}
        async with (
            Decathlon(served.url) as d,
            d.batch(tasks, concurrency=4, n=2, progress=False, **options) as batch,
        ):
            return [result for group in [g async for g in batch.run_groups(player)] for result in group]

    dropped = await play(["say-answer"], SHORT_SECONDS)
    assert [result.fault for result in dropped] == ["deadline"] * 2
    assert file.read_bytes() == b""
    played = await play(["find-answer"], LONG_SECONDS)
    again = await play(["find-answer", "say-answer"], SHORT_SECONDS)
    # The time of a group with verdicts is not counted from then.
    assert [(result.task, result.resumed, result.fault) for result in again] == [
        ("find-answer", True, None),
        ("find-answer", True, None),
        ("say-answer", False, "deadline"),
        ("say-answer", False, "deadline"),
    ]
    assert [result.verdict for result in again[:2]] == [result.verdict for result in played]
    assert again[2].episode not in {result.episode for result in dropped}


async def test_the_tools_of_a_task_are_those_of_its_episodes_and_are_opened_once(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, provider="host") as served, Decathlon(served.url) as d:
        first = await d.tools("find-answer")
        assert await d.tools("say-answer") is first  # its servers are the same
        async with Decathlon(served.url) as other:
            # The server has the list now.
            assert [tool.raw for tool in await other.tools("find-answer")] == [tool.raw for tool in first]
        assert len([*(served.state / "episodes").iterdir()]) == 1
        async with d.episode("find-answer") as e:
            assert [tool.raw for tool in e.tools] == [tool.raw for tool in first]


HOLDER = """
import sys
from decathlon_client.resume import verdict_record
with verdict_record(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


async def test_a_file_that_another_process_uses_is_refused_and_stays_as_it_is(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "verdicts.jsonl"
    await _play(served, file, ["find-answer"])
    before = file.read_bytes()
    command = [sys.executable, "-c", HOLDER, str(file)]
    async with await anyio.open_process(command) as holder:
        assert holder.stdout is not None
        assert (await holder.stdout.receive()).startswith(b"locked")
        with pytest.raises(ValueError, match="another batch uses this file"):
            await _play(served, file, ["find-answer", "say-answer"])
        assert file.read_bytes() == before
        holder.kill()  # its lock ends with it
    results = await _play(served, file, ["find-answer", "say-answer"])
    assert [result.resumed for result in results] == [True, False]


async def test_verdicts_of_another_revision_end_the_batch_with_an_error(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "verdicts.jsonl"
    (first,) = await _play(served, file, ["find-answer"])
    assert first.verdict is not None
    record = json.loads(file.read_bytes())
    assert (record["suite"], record["suite_revision"]) == (
        first.verdict.raw["suite"],
        first.verdict.raw["suite_revision"],
    )
    record["verdict"]["suite_revision"] = "another"
    file.write_text(json.dumps(record) + "\n")
    before = file.read_bytes()
    with pytest.raises(ValueError, match="verdicts of find-answer in revision another of"):
        await _play(served, file, ["find-answer"] * 2)
    assert file.read_bytes() == before
