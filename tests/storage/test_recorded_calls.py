"""The calls of a trajectory, for those who play them again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from decathlon_mcp.plugins.history.replies import recorded_calls
from decathlon_mcp.storage.trajectory import CallLines
from tests.storage.test_trajectory import new


def test_calls_know_which_others_ran_meanwhile(tmp_path: Path) -> None:
    with closing(new(tmp_path)) as trajectory:
        for event, seq in (
            *(("call", 1), ("reply", 1)),
            *(("call", 2), ("call", 3), ("reply", 3), ("reply", 2)),
            *(("call", 4), ("call", 5), ("reply", 5)),
        ):
            trajectory.add(event, seq=seq)
        found = list(trajectory.sent_calls())
        assert [call.seq for call in recorded_calls(trajectory) if call.overlaps] == [2, 3, 4]
        assert [call.seq for call in recorded_calls(trajectory, 2)] == [1, 2]
    assert found[3] == CallLines(4, found[3].call, b"", found[3].call_at, float("inf"))
