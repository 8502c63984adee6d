"""Short form of `python -m benchmarks.many`."""

from __future__ import annotations

import pytest

from benchmarks.many import Options, measure_many

pytestmark = pytest.mark.anyio


async def test_merging_episodes_are_graded_each_by_its_own_work_and_nothing_is_left() -> None:
    options = Options(episodes=2, merge_pages=True, servers=1, provider="host", settle_seconds=0)
    many = await measure_many(options)
    assert many.is_complete, many
    assert many.processes_mib > 0
