"""The deadline of a group: who plays at it, who has not begun, and who is not waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon, Episode, Result

from decathlon_mcp.episodes.state import Phase
from tests.probe.serving import Served, folder_of, serving

GROUP_SECONDS = 20.0
"""Long enough for episodes to open on a busy machine; the attempts that are late play for ever."""
PROMPT_SECONDS = 250.0
"""Far below the half hour that a straggler here would take."""

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def _play_group(
    served: Served, task: str, n: int, concurrency: int, slow: set[int], **options: Any
) -> list[Result[int]]:
    """The results of a group in which the attempts of `slow` never end by themselves."""
    attempts = iter(range(n))

    async def player(e: Episode) -> int:
        attempt = next(attempts)
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        if attempt in slow:
            await anyio.sleep(1800)
        await e.claim_done()
        return attempt

    with anyio.fail_after(PROMPT_SECONDS):
        async with (
            Decathlon(served.url) as d,
            d.batch(
                [task], concurrency=concurrency, n=n, group_seconds=GROUP_SECONDS, progress=False, **options
            ) as batch,
        ):
            (group,) = [group async for group in batch.run_groups(player)]
    counts = (batch.tally.scored, batch.tally.dropped, batch.tally.done)
    assert counts == (sum(r.reward is not None for r in group), sum(r.fault is not None for r in group), n)
    return group


async def test_an_attempt_in_play_is_truncated_and_graded_as_it_stands(served: Served) -> None:
    group = await _play_group(served, "find-answer", n=2, concurrency=2, slow={1})
    assert [result.reward for result in group] == [1.0, 1.0]
    late = [result for result in group if result.played is None]
    assert [result.verdict and result.verdict.raw["truncated"] for result in late] == [True]


async def test_dropped_attempts_are_named_and_closed(served: Served) -> None:
    group = await _play_group(served, "find-answer", n=2, concurrency=2, slow={1}, late="drop")
    (late,) = [result for result in group if result.fault is not None]
    assert (late.reward, late.fault) == (None, "deadline")
    assert isinstance(late.failure, TimeoutError)
    assert str(late.failure) == (
        f"attempt {late.attempt} of find-answer is dropped: "
        f"it was playing when the {GROUP_SECONDS:g} s of its group were over"
    )
    handle = folder_of(served.state, str(late.episode)).name
    await served.find(handle).state.reach(Phase.ENDED)


async def test_attempts_that_have_not_begun_are_dropped_without_an_episode(served: Served) -> None:
    before = {*(served.state / "episodes").iterdir()}
    group = await _play_group(served, "find-answer", n=3, concurrency=1, slow={0})
    assert [(result.reward, result.fault) for result in group] == [
        (1.0, None),
        (None, "deadline"),
        (None, "deadline"),
    ]
    assert "it was opening" in str(group[1].failure)
    assert len({*(served.state / "episodes").iterdir()} - before) == 1


async def test_a_group_is_not_late_for_what_the_trainer_does_between_groups(served: Served) -> None:
    async def player(e: Episode) -> None:
        await e.claim_done()

    options: dict[str, Any] = {"group_seconds": GROUP_SECONDS, "late": "drop", "progress": False}
    faults: list[str | None] = []
    async with (
        Decathlon(served.url) as d,
        d.batch(["find-answer"] * 2, concurrency=1, n=2, **options) as batch,
    ):
        async for group in batch.run_groups(player):
            faults += [result.fault for result in group]
            if len(faults) == 2:  # one attempt of the other group has begun
                await anyio.sleep(GROUP_SECONDS + 1)  # its weights are updated
    assert faults == [None] * 4


async def test_the_wait_for_a_place_is_no_time_of_the_player(tmp_path: Path) -> None:
    async def player(e: Episode) -> str:
        return (await e.call("probe__read", {"path": "question.txt"})).text

    results: list[Result[str]] = []
    async with (
        serving(tmp_path / "state", provider="host", servers="lazy", max_sandboxes=1) as served,
        Decathlon(served.url) as d,
        d.batch(["find-answer"], concurrency=1, player_seconds=60.0, progress=False) as batch,
        anyio.create_task_group() as tasks,
    ):
        # Afterwards the server knows the tools of the task before an episode has its sandbox.
        async with d.episode("find-answer"):

            async def play() -> None:
                results.extend([result async for result in batch.run(player)])

            tasks.start_soon(play)
            await anyio.sleep(3.0)  # for a player that does not wait
            assert (batch.tally.opening, batch.tally.playing) == (1, 0)
    (result,) = results
    assert (result.played, result.verdict and result.verdict.raw["truncated"]) == ("six times seven\n", False)
