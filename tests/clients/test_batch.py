"""Batches: concurrency, results as they are ready, and whose fault failures are."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_client import (
    Batch,
    ConnectionLostError,
    Decathlon,
    Episode,
    NoVerdictError,
    PlayerFailedError,
    Result,
    SetUpError,
    Summary,
    opener,
)

from decathlon_mcp.episodes.state import Phase
from tests.clients.relay import relayed
from tests.driver.peer import until
from tests.probe.serving import Served, folder_of, serving
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

INTERRUPTED = Path(__file__).parent / "interrupted.py"
AT_MOST_SECONDS = 25.0
"""5 s are promised; the rest is for a busy machine. Without the shortened budget it is 30 s or more."""


async def solve(e: Episode) -> str:
    await e.call("probe__write", {"path": "answer.txt", "text": "42"})
    await e.claim_done()
    return e.task


async def test_every_task_has_its_own_result(served: Served) -> None:
    async def player(e: Episode) -> str:
        if e.task == "say-answer":
            raise LookupError("a bug in the player")
        return await solve(e)

    tasks = ["find-answer", "failing-preprocess", "lost-verdict", "say-answer", "made-answer"]
    async with Decathlon(served.url) as d, d.batch(tasks, concurrency=3, progress=False, tries=1) as batch:
        results = {result.task: result async for result in batch.run(player)}
    assert [results[task].index for task in tasks] == [0, 1, 2, 3, 4]
    scored = results["find-answer"]
    assert (scored.reward, scored.played, scored.failure, scored.fault) == (1.0, "find-answer", None, None)
    assert [results[task].reward for task in tasks[1:4]] == [None] * 3
    assert [results[task].fault for task in tasks[1:4]] == ["infrastructure", "infrastructure", "player"]
    kinds = [SetUpError, NoVerdictError, PlayerFailedError]
    assert [type(results[task].failure) for task in tasks[1:4]] == kinds
    episodes = [results[task].episode for task in tasks]
    handles = [folder_of(served.state, str(episode)).name for episode in episodes]
    assert [served.find(handle).spec.task_name for handle in handles] == tasks
    assert {result.page for result in results.values()} == {None}  # this server has no page
    tally = batch.tally
    assert (tally.total, tally.done, tally.scored, tally.lost, tally.broken) == (5, 5, 2, 2, 1)
    assert (tally.opening, tally.playing, tally.grading) == (0, 0, 0)
    assert tally.mean_reward == (1.0 + (results["made-answer"].reward or 0.0)) / 2
    assert (tally.seconds_left, tally.away_seconds) == (0.0, None)
    assert set(batch.summary.tasks) == set(Summary.of(results.values()).tasks)


YEAR_SECONDS = 365 * 86_400
ENDINGS = ("in-a-call", "between-calls", "in-an-act")


async def test_episodes_whose_time_is_over_are_results_with_a_reward_of_zero(tmp_path: Path) -> None:
    endings = iter(ENDINGS)

    async def expire(e: Episode, *, after_calls: int) -> None:
        episode = served.find(e.id)
        await until(lambda: episode.was_ready and episode.calls.sent == after_calls)
        episode.lease.start(elapsed_seconds=YEAR_SECONDS)

    async def player(e: Episode) -> None:
        ending = next(endings)
        calls = ending != "between-calls"
        clock.start_soon(partial(expire, e, after_calls=int(calls)))
        if ending == "in-a-call":
            await e.call("probe__sleep", {"seconds": 100, "note": "late"})
        elif ending == "in-an-act":
            assert (await e.act("probe__sleep", {"seconds": 100, "note": "late"})).is_error
            assert e.claimed
        else:
            await until(lambda: served.find(e.id).state.phase is Phase.ENDED)
            await e.call("probe__echo", {"text": "late"})

    results: list[Result[None]] = []
    async with (
        serving(tmp_path, provider="host") as served,
        Decathlon(served.url) as d,
        anyio.create_task_group() as clock,
        d.batch(["find-answer"] * len(ENDINGS), concurrency=8, progress=False) as batch,
    ):
        results += [result async for result in batch.run(player)]
    verdicts = [result.verdict and (result.verdict.status, result.reward) for result in results]
    assert verdicts == [("forfeited", 0.0)] * len(ENDINGS), [result.failure for result in results]
    assert {(result.failure, result.fault) for result in results} == {(None, None)}
    assert (batch.tally.scored, batch.tally.lost, batch.tally.broken) == (len(ENDINGS), 0, 0)


async def test_concurrency_limits_the_episodes_played_at_once(served: Served) -> None:
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


async def test_tasks_are_drawn_as_needed_and_leaving_closes_the_rest(served: Served) -> None:
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


async def test_an_error_of_the_task_iterable_is_raised_after_the_drawn_tasks(served: Served) -> None:
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


async def test_a_group_is_its_tasks_episodes_with_one_prompt(served: Served) -> None:
    prompts: dict[str, set[str]] = {}

    async def player(e: Episode) -> None:
        prompts.setdefault(e.task, set()).add(e.prompt.replace(e.id, ""))
        if e.task == "find-answer":
            await solve(e)

    tasks = ["say-answer", "find-answer"]
    async with Decathlon(served.url) as d, d.batch(tasks, concurrency=3, n=3, progress=False) as batch:
        assert batch.tally.total == 6
        groups = [group async for group in batch.run_groups(player)]
    groups.sort(key=lambda group: group[0].group)
    assert [[(r.task, r.group, r.attempt, r.index) for r in group] for group in groups] == [
        [(task, number, attempt, 3 * number + attempt) for attempt in range(3)]
        for number, task in enumerate(tasks)
    ]
    assert [[r.reward for r in group] for group in groups] == [[0.0] * 3, [1.0] * 3]
    assert [task.pass_at(3) for task in batch.summary.tasks] == [0.0, 1.0]


async def test_a_batch_waits_for_a_server_that_went_away_and_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opener, "AWAY_PAUSE_SECONDS", 0.05)
    caplog.set_level("INFO", "decathlon.client")
    players = itertools.count()

    async def player(e: Episode) -> None:
        if next(players) == 0:
            await relay.refuse()
            tasks.start_soon(restore_after_two_tries)
        else:
            await solve(e)

    async def restore_after_two_tries() -> None:
        while caplog.text.count("Opening an episode again") < 2:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert "waiting for the server for" in str(batch.tally)
        await relay.listen()

    async with anyio.create_task_group() as tasks, relayed(served) as (relay, url):
        async with Decathlon(url, resend_seconds=0.1) as d:
            async with d.batch(["find-answer"] * 3, concurrency=1, progress=False, tries=1) as batch:
                lost, *others = [result async for result in batch.run(player)]
            assert isinstance(lost.failure, ConnectionLostError)
            assert lost.episode is not None
            assert [result.reward for result in others] == [1.0, 1.0]
            assert batch.tally.away_seconds is None


async def test_a_server_that_stays_away_ends_the_batch_and_no_more_tasks_are_drawn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "AWAY_PAUSE_SECONDS", 0.05)
    drawn = itertools.count()
    tasks = ("find-answer" for _ in drawn)
    results: list[Result[str]] = []

    async def play(batch: Batch) -> None:
        async for result in batch.run(solve):
            results.append(result)  # noqa: PERF401

    async with relayed(served) as (relay, url), Decathlon(url, resend_seconds=0.1) as d:
        await relay.refuse()
        async with d.batch(tasks, concurrency=2, progress=False, patience_seconds=0.5) as batch:
            with pytest.raises(ConnectionLostError, match="no more tasks are played"):
                await play(batch)
    assert [(result.fault, result.episode) for result in results] == [("infrastructure", None)] * 2
    assert next(drawn) == 2


async def test_a_player_past_its_time_limit_is_truncated_and_graded(served: Served) -> None:
    async def player(e: Episode) -> None:
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await anyio.sleep_forever()

    async with Decathlon(served.url) as d:
        async with d.batch(["find-answer"], concurrency=1, progress=False, player_seconds=1) as batch:
            (result,) = [result async for result in batch.run(player)]
    assert result.verdict is not None
    assert (result.reward, result.verdict.raw["truncated"], result.played) == (1.0, True, None)


async def test_ctrl_c_ends_a_batch_soon_also_while_its_server_hangs(tmp_path: Path) -> None:
    async with supervised_server(tmp_path / "state", "--drain-seconds", "5") as server:
        command = [sys.executable, str(INTERRUPTED), server.url]
        async with await anyio.open_process(command, stderr=None) as client:
            assert client.stdout is not None
            output = BufferedByteReceiveStream(client.stdout)
            await output.receive_until(b"playing\n", 1 << 16)
            pid = server.server_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                started = time.monotonic()
                client.send_signal(signal.SIGINT)
                await client.wait()
                took = time.monotonic() - started
            finally:
                os.kill(pid, signal.SIGCONT)
        assert took < AT_MOST_SECONDS
        assert client.returncode == 130


async def test_a_batch_names_its_run_once_and_labels_its_episodes(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    async def player(e: Episode) -> Mapping[str, str]:
        await solve(e)
        return e.labels

    async with Decathlon(served.url) as d:
        async with d.batch(["find-answer"], concurrency=1, n=2, labels={"model": "m"}) as batch:
            results = [result async for result in batch.run(player)]
        async with d.batch(["find-answer"], concurrency=1, run="a", progress=False) as named:
            results += [result async for result in named.run(player)]
        with pytest.raises(ValueError, match="a batch sets the labels group itself"):
            d.batch([], concurrency=1, labels={"group": "3"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}-[a-z]{4}", batch.run_name)
    assert capsys.readouterr().err.count(f"run {batch.run_name}\n") == 1
    labels = [dict(result.verdict.raw["labels"]) for result in results if result.verdict is not None]
    assert labels == [result.played for result in results]
    common = {"model": "m", "run": batch.run_name, "group": "0"}
    assert sorted(labels[:2], key=lambda each: each["attempt"]) == [
        {**common, "attempt": "0"},
        {**common, "attempt": "1"},
    ]
    assert labels[2] == {"run": "a", "group": "0", "attempt": "0"}
