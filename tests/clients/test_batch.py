"""Batches: so many at a time, results as they come, failures by whose fault they are."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_client import Batch, ConnectionLostError, Decathlon, Episode, NoVerdictError, SetUpError

from decathlon_mcp.episodes import admission
from decathlon_mcp.episodes.state import Phase
from tests.clients.processes import server_process
from tests.clients.relay import relayed
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

INTERRUPTED = Path(__file__).parent / "interrupted.py"
AT_MOST_SECONDS = 25.0
"""5 s are promised; the rest is for a busy machine. Without hurry it would be 30 and more."""


async def solve(e: Episode) -> str:
    await e.call("probe__write", {"path": "answer.txt", "text": "42"})
    await e.claim_done()
    return e.task


async def test_every_task_has_its_own_result(served: Served) -> None:
    async def player(e: Episode) -> str:
        if e.task == "say-answer":
            raise LookupError("a bug of the player's")
        return await solve(e)

    tasks = ["find-answer", "failing-preprocess", "crashing-verdict", "say-answer", "made-answer"]
    async with Decathlon(served.url) as d, d.batch(tasks, concurrency=3, progress=False, tries=1) as batch:
        results = {result.task: result async for result in batch.run(player)}
    assert [results[task].index for task in tasks] == [0, 1, 2, 3, 4]
    found = results["find-answer"]
    assert (found.reward, found.played, found.failure, found.fault) == (1.0, "find-answer", None, None)
    assert [results[task].reward for task in tasks[1:4]] == [None] * 3
    assert [results[task].fault for task in tasks[1:4]] == ["infrastructure", "infrastructure", "player"]
    kinds = [SetUpError, NoVerdictError, LookupError]
    assert [type(results[task].failure) for task in tasks[1:4]] == kinds
    tally = batch.tally
    assert (tally.total, tally.done, tally.scored, tally.lost, tally.broken) == (5, 5, 2, 2, 1)
    assert (tally.opening, tally.playing, tally.grading) == (0, 0, 0)
    assert tally.mean_reward == (1.0 + (results["made-answer"].reward or 0.0)) / 2


async def test_no_more_play_at_once_than_was_said(served: Served) -> None:
    playing: set[str] = set()
    most = 0

    async def player(e: Episode) -> None:
        nonlocal most
        playing.add(e.id)
        most = max(most, len(playing), len(served.episodes.live))
        await e.call("probe__echo", {"text": ""})
        playing.discard(e.id)

    async with Decathlon(served.url) as d:
        async with d.batch(["find-answer"] * 5, concurrency=2, progress=False) as batch:
            assert [result.reward async for result in batch.run(player)] == [0.0] * 5
    assert most == 2


async def test_tasks_are_drawn_as_they_are_needed_and_the_rest_is_closed(served: Served) -> None:
    drawn = itertools.count()

    async def tasks() -> AsyncGenerator[str]:
        for _ in drawn:
            yield "find-answer"

    async with Decathlon(served.url) as d:
        async with d.batch(tasks(), concurrency=2, progress=False) as batch:
            results = batch.run(solve)
            assert (await anext(results)).reward == 1.0
            # One was taken; each of two workers holds one that nobody takes, and no sandbox.
            while batch.tally.done < 3:  # noqa: ASYNC110  (whatever has no event, a slow machine has late)
                await anyio.sleep(0.01)
            assert batch.tally.total is None
            await results.aclose()
        assert next(drawn) == 3
        for episode in list(served.episodes.live):
            await episode.state.reach(Phase.ENDED)


async def test_what_drawing_a_task_raises_ends_the_run_after_what_was_drawn(served: Served) -> None:
    def tasks() -> Generator[str]:
        yield "find-answer"
        raise LookupError("no more")

    rewards: list[float | None] = []

    async def play(batch: Batch) -> None:
        async for result in batch.run(solve):
            rewards.append(result.reward)  # noqa: PERF401

    async with Decathlon(served.url) as d, d.batch(tasks(), concurrency=2, progress=False) as batch:
        with pytest.raises(LookupError, match="no more"):
            await play(batch)
    assert rewards == [1.0]


async def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_SECONDS", (0.05, 0.1))
    async with (
        serving(tmp_path, provider="local", max_sandboxes=1, max_queue=0) as served,
        Decathlon(served.url) as d,
        d.batch(["find-answer"] * 3, concurrency=3, progress=False, tries=1) as batch,
    ):
        assert [result.reward async for result in batch.run(solve)] == [1.0] * 3


async def test_a_full_server_is_not_asked_for_ever(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, provider="local", max_sandboxes=1, max_queue=0) as served,
        Decathlon(served.url) as d,
        d.episode("find-answer"),
        d.batch(["find-answer"], concurrency=1, progress=False, patience_seconds=0) as batch,
    ):
        (result,) = [result async for result in batch.run(solve)]
    assert result.fault == "infrastructure"


async def test_an_opening_that_failed_is_tried_again_and_a_call_never_is(served: Served) -> None:
    calls = 0

    async def player(e: Episode) -> None:
        nonlocal calls
        calls += 1

        async def cut(progress: float, total: float | None, message: str | None) -> None:
            await relay.cut()

        await e.call("probe__count", {"to": 2, "pause": 100}, on_progress=cut)

    async with relayed(served) as (relay, url), Decathlon(url) as d:
        async with d.batch(["find-answer"], concurrency=1, progress=False) as batch:
            (result,) = [result async for result in batch.run(player)]
    assert isinstance(result.failure, ConnectionLostError)
    assert (calls, result.fault, result.reward) == (1, "infrastructure", None)


async def test_a_player_out_of_time_is_truncated_and_graded(served: Served) -> None:
    async def player(e: Episode) -> None:
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await anyio.sleep_forever()

    async with Decathlon(served.url) as d:
        async with d.batch(["find-answer"], concurrency=1, progress=False, player_seconds=1) as batch:
            (result,) = [result async for result in batch.run(player)]
    assert result.verdict is not None
    assert (result.reward, result.verdict.raw["truncated"], result.played) == (1.0, True, None)


@pytest.mark.parametrize("server_hangs", [False, True])
async def test_ctrl_c_ends_it_soon_with_nothing_left(server_hangs: bool, tmp_path: Path) -> None:
    async with server_process(tmp_path) as (server, url):
        command = [sys.executable, str(INTERRUPTED), url]
        async with await anyio.open_process(command, stderr=None) as client:
            assert client.stdout is not None
            said = BufferedByteReceiveStream(client.stdout)
            await said.receive_until(b"playing\n", 1 << 16)
            if server_hangs:
                server.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            client.send_signal(signal.SIGINT)
            await client.wait()
            took = time.monotonic() - started
        if server_hangs:
            server.send_signal(signal.SIGCONT)
        assert took < AT_MOST_SECONDS
        assert client.returncode == 130
        if not server_hangs:
            ended = [path.read_text() for path in (tmp_path / "episodes").glob("*/trajectory.jsonl")]
            assert len(ended) == 4
            assert all("closed by its client" in each for each in ended)


async def test_a_concurrency_of_none_is_refused(served: Served) -> None:
    async with Decathlon(served.url) as d:
        with pytest.raises(ValueError, match="at least 1"):
            async with d.batch([], concurrency=0):
                pass
