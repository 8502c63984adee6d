"""Calls read from trajectories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.logged_calls import UNANSWERED
from decathlon_mcp.storage.trajectory import TrajectoryCalls, has_ended

CALL: dict[str, Any] = {"server": "files", "tool": "read", "name": "files__read", "arguments": {"path": "a"}}
REPLY: dict[str, Any] = {"failed": False, "seconds": 0.5, "result": {"content": []}}


def write(file: Path, *events: dict[str, Any]) -> Path:
    file.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return file


def test_calls_of_a_journal_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "episode")
    trajectory = journal.folder / "trajectory.jsonl"
    for seq in (1, 2, 3):
        journal.add_call(seq=seq, started_at=float(seq), **CALL)
    for seq in (3, 1):
        journal.add_reply(seq=seq, **REPLY)
    journal.add_reply(seq=2, failed=True, seconds=1.0, failure={"message": "too slow"})
    journal.add("claim", answer="x")
    first, second, third = TrajectoryCalls(trajectory)
    assert [call["seq"] for call in (first, second, third)] == [1, 2, 3]
    assert (first["failed"], first["seconds"], first["result"]) == (False, 0.5, {"content": []})
    assert (second["failed"], second["result"]) == (True, {"error": "too slow"})
    assert (third["started_at"], third["arguments"]) == (3.0, {"path": "a"})
    assert not has_ended(trajectory)
    journal.add("end", ending="closed")
    journal.close()
    assert has_ended(trajectory)


def test_a_call_without_a_reply_has_failed(tmp_path: Path) -> None:
    file = write(tmp_path / "trajectory.jsonl", {"event": "call", "seq": 1, "started_at": 1.0, **CALL})
    (call,) = TrajectoryCalls(file)
    assert (call["failed"], call["result"], call["seconds"]) == (True, {"error": UNANSWERED}, 0.0)


def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "trajectory.jsonl", {"event": "call", "seq": 1, "started_at": 1.0, **CALL})
    with file.open("ab") as lines:
        lines.write(b'{"event": "call", "seq": 2, "too')
    calls = TrajectoryCalls(file)
    assert [call["seq"] for call in calls] == [1]
    assert not has_ended(file)


def test_an_empty_trajectory_has_no_calls_and_no_end(tmp_path: Path) -> None:
    file = write(tmp_path / "trajectory.jsonl")
    assert list(TrajectoryCalls(file)) == []
    assert not has_ended(file)
