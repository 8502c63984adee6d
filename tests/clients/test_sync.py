"""The synchronous client: the same names and replies, without an event loop of the caller."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decathlon_client import UnknownToolError
from decathlon_client.sync import Decathlon, Episode

from tests.clients.stubs import STUB, stub
from tests.probe.serving import SUITE

INTERRUPTED = Path(__file__).parent / "interrupted_sync.py"
AT_MOST_SECONDS = 25.0
"""5 s are promised; the rest is for a machine that is busy starting and ending Pythons."""


@pytest.fixture(scope="module")
def d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decathlon]:
    state = tmp_path_factory.mktemp("state")
    with Decathlon.embedded(SUITE, "host", state=state, drain_seconds=5) as d:
        yield d


def solve(e: Episode) -> str:
    e.call("probe__write", {"path": "answer.txt", "text": "42"})
    e.claim_done()
    return e.task


def test_the_stub_matches_the_asynchronous_classes() -> None:
    assert STUB.read_text("utf-8") == stub(), "generate it again: python -m tests.clients.stubs"


def test_an_episode_is_played_to_its_reward(d: Decathlon) -> None:
    assert "find-answer" in {task.id for task in d.tasks(prompts=False)}
    reports: list[float] = []

    def report(progress: float, total: float | None, message: str | None) -> None:
        time.sleep(0.05 if progress == 1 else 0)  # the others must not overtake it
        reports.append(progress)

    with d.episode("find-answer") as e:
        assert e.task == "find-answer"
        assert e.tools[-1].name == "claim_done"
        e.call("probe__count", {"to": 3, "pause": 0.01}, on_progress=report)
        with pytest.raises(UnknownToolError):
            e.call("probe__eccho")
        solve(e)
        assert e.claimed
        assert e.evaluate().reward == 1.0
    assert reports == [1, 2, 3]


def test_a_batch_is_played_by_a_plain_function(d: Decathlon) -> None:
    with d.batch(["find-answer"] * 3, concurrency=2, progress=False) as batch:
        results = list(batch.run(solve))
        assert batch.tally.scored == 3
    assert [(result.reward, result.played) for result in results] == [(1.0, "find-answer")] * 3


def test_ctrl_c_ends_a_batch_soon(tmp_path: Path) -> None:
    command = [sys.executable, str(INTERRUPTED), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "playing\n"
        started = time.monotonic()
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130
    assert time.monotonic() - started < AT_MOST_SECONDS
    ended = [path.read_text() for path in (tmp_path / "episodes").glob("*/trajectory.jsonl")]
    assert len(ended) == 2
    assert all('"ended"' in each or "its client left before grading" in each for each in ended)


def test_a_client_that_is_not_open_says_so() -> None:
    never = Decathlon("http://127.0.0.1:9")
    for use in (
        never.tasks,
        lambda: never.episode("find-answer").__enter__(),
        lambda: list(never.batch(["find-answer"], concurrency=1).__enter__().run(solve)),
    ):
        with pytest.raises(RuntimeError, match="use it in `with`"):
            use()


FORKED = """
import os, sys
from decathlon_client.sync import Decathlon
from tests.probe.serving import SUITE

embedded = Decathlon.embedded(SUITE, "host", state=sys.argv[1], drain_seconds=5)
with embedded as d, d.episode("find-answer") as e:
    child = os.fork()
    if not child:
        for use in (d.tasks, e.evaluate, d.episode("find-answer").__enter__):
            try:
                use()
            except RuntimeError as error:
                assert "before a fork" in str(error), error
            else:
                sys.exit(2)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert e.call("probe__echo", {"text": "alive"}).text == "alive"
print("done")
"""


def test_after_a_fork_the_child_is_refused_and_leaves_the_parents_client_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Agent:
    def __call__(self, e: Episode) -> str:
        return solve(e)


async def solve_later(e: Episode) -> None:
    solve(e)


def test_a_player_is_any_plain_callable_and_an_asynchronous_one_is_an_error(d: Decathlon) -> None:
    players: list[Any] = [Agent(), functools.partial(solve), solve_later, Agent().__call__]
    rewards: list[float | None] = []
    failures: list[str] = []
    for player in players:
        with d.batch(["find-answer"], concurrency=1, progress=False) as batch:
            for result in batch.run(player):
                rewards.append(result.reward)
                failures.append(str(result.failure))
    assert rewards == [1.0, 1.0, None, 1.0], failures
    assert "plain functions, and this one returned coroutine" in failures[2]
