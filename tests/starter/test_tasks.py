"""For every task of the starter suite, doing nothing fails and the oracle passes."""

from __future__ import annotations

import pytest

from decathlon_mcp.starter import oracle_ids
from tests.starter.conftest import LayOut

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASKS = oracle_ids()


@pytest.mark.parametrize("task", TASKS)
async def test_an_attempt_that_does_nothing_fails(task: str, lay_out: LayOut) -> None:
    outcome = lay_out(task).evaluate()
    assert outcome.exit_code == 1, outcome.output
    assert outcome.output.splitlines()[-1].startswith("FAIL: ")
