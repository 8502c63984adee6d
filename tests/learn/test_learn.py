"""The example that trains: its suite is honest, and two steps of it run where torch is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from decathlon_client import Decathlon, Episode, Verdict

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "learn"
TIMES = ("2026-01-01T00:00:00+00:00", "2027-05-06T07:08:00+00:00")


@pytest.fixture
async def d(tmp_path: Path) -> AsyncGenerator[Decathlon]:
    async with Decathlon.embedded(EXAMPLE / "suite", "host", state=tmp_path, drain_seconds=5) as d:
        yield d


async def restock(e: Episode) -> None:
    listed = (await e.call("shelf__list")).text
    for state, product in (line.split() for line in listed.splitlines()):
        if state == "gone":
            assert not (await e.call("shelf__order", {"state": state, "product": product})).is_error


async def deliver(e: Episode) -> None:
    listed = (await e.call("mail__list")).text
    for kind, name, room in (line.split() for line in listed.splitlines()):
        if kind == "urgent":
            assert not (await e.call("mail__deliver", {"kind": kind, "name": name, "room": room})).is_error


SOLUTIONS = {"restock-shelf": restock, "deliver-mail": deliver}
WASTE = {"restock-shelf": ("shelf__order", "product"), "deliver-mail": ("mail__deliver", "name")}


async def graded(d: Decathlon, task: str, launch_time: str, *, solves: bool) -> tuple[str, Verdict]:
    """What an attempt saw first, and its verdict: of a solution, or of one that does nothing."""
    async with d.episode(task, launch_time=launch_time) as e:
        listed = (await e.call(f"{WASTE[task][0].split('__')[0]}__list")).text
        if solves:
            await SOLUTIONS[task](e)
        await e.claim_done()
        return listed, await e.evaluate()


@pytest.mark.parametrize("task", SOLUTIONS)
async def test_a_solution_earns_everything_an_empty_attempt_nothing_and_launch_times_differ(
    d: Decathlon, task: str
) -> None:
    seen, solved = await graded(d, task, TIMES[0], solves=True)
    again, empty = await graded(d, task, TIMES[0], solves=False)
    assert (solved.reward, solved.success, empty.reward, empty.success) == (1.0, True, 0.0, False)
    async with d.episode(task, launch_time=TIMES[1]) as e:
        assert seen == again != (await e.call(f"{WASTE[task][0].split('__')[0]}__list")).text


async def test_part_of_a_solution_earns_a_part_and_mistakes_cost(d: Decathlon) -> None:
    async with d.episode("restock-shelf", launch_time=TIMES[0]) as e:
        shelf = dict(line.split()[::-1] for line in (await e.call("shelf__list")).text.splitlines())
        gone = next(product for product, state in shelf.items() if state == "gone")
        full = next(product for product, state in shelf.items() if state == "full")
        await e.call("shelf__order", {"state": "gone", "product": gone})
        assert (await e.call("shelf__order", {"state": "gone", "product": "gold"})).is_error
        halves = [(await d.rewards_along(e))[-1]]
        await e.call("shelf__order", {"state": "full", "product": full})
        assert [each and each.reward for each in [*halves, await e.evaluate()]] == [0.5, 0.25]


@pytest.mark.timeout(900)
def test_two_steps_of_the_training_leave_a_curve(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    words = shlex.split("--steps 2 --groups 1 --warm-up-steps 2 --held-out 1 --layers 1 --width 32 --run ci")
    folders = ["--state", f"{tmp_path / 'state'}", "--out", f"{tmp_path}"]
    command = [sys.executable, "-m", "examples.learn", *words, *folders]
    root = EXAMPLE.parents[1]
    # Two threads that wait for each other at every step take minutes beside other tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    record: dict[str, Any] = json.loads((tmp_path / "ci.json").read_text())
    assert [step["episodes"] for step in record["steps"]] == [8, 8]
    assert record["faults"] == {}
    assert max(record["prompt_tokens"].values()) <= 300
    assert (tmp_path / "ci.svg").read_text().startswith("<svg")
    assert len((tmp_path / "ci.verdicts.jsonl").read_text().splitlines()) == 16
