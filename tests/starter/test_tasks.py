"""For every task of the starter suite, doing nothing fails and the oracle passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from decathlon_mcp.starter import oracle_ids
from tests.starter.conftest import LayOut, Solved

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASKS = oracle_ids()


@pytest.mark.parametrize("task", TASKS)
async def test_an_attempt_that_does_nothing_fails(task: str, lay_out: LayOut) -> None:
    outcome = lay_out(task).evaluate()
    assert outcome.exit_code == 1, outcome.output
    assert outcome.output.splitlines()[-1].startswith("FAIL: ")


@pytest.mark.parametrize("task", TASKS)
async def test_the_oracle_passes(task: str, solved: Solved, tmp_path: Path) -> None:
    outcome = (await solved(task, tmp_path / "episode")).evaluate()
    assert (outcome.exit_code, outcome.output) == (0, "PASS\n")
