"""Batches that are started again with the file of their verdicts, and the tools of a task."""

from __future__ import annotations

from pathlib import Path

import pytest
from decathlon_client import Decathlon, Episode, Result, UnknownTaskError

from tests.probe.serving import Served

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


async def test_the_tools_of_a_task_are_those_of_its_episodes_and_are_opened_once(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        expected = [tool.raw for tool in e.tools]
    assert [tool.raw for tool in await d.tools("find-answer")] == expected
    assert await d.tools("find-answer") is await d.tools("find-answer")
    with pytest.raises(UnknownTaskError) as raised:
        await d.tools("find-answr")
    assert "find-answer" in raised.value.near
