"""Calls read from trajectories of every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.trajectory import NO_REPLY, RecordedCalls

CALL: dict[str, Any] = {"server": "files", "tool": "read", "name": "files__read", "arguments": {"path": "a"}}
REPLY: dict[str, Any] = {"failed": False, "seconds": 0.5, "result": {"content": []}}


def write(file: Path, *events: dict[str, Any]) -> Path:
    file.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return file


def test_calls_of_a_journal_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "episode")
    for seq in (2, 1, 3):
        journal.add_call(seq=seq, started_at=float(seq), **CALL, **REPLY)
    journal.add("claim", answer="x")
    calls = RecordedCalls(journal.folder / "trajectory.jsonl")
    assert [call["seq"] for call in calls] == [1, 2, 3]
    assert [call["started_at"] for call in calls] == [1.0, 2.0, 3.0]
    assert not calls.ended
    journal.add("end", ending="closed")
    journal.close()
    assert RecordedCalls(journal.folder / "trajectory.jsonl").ended


def test_a_call_and_its_reply_are_joined(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trajectory.jsonl",
        {"event": "call", "time": 1.0, "seq": 1, **CALL},
        {"event": "call", "time": 2.0, "seq": 2, **CALL},
        {"event": "reply", "time": 3.0, "seq": 2, **REPLY, "failed": True},
        {"event": "reply", "time": 4.0, "seq": 1, **REPLY},
    )
    first, second = RecordedCalls(file)
    assert (first["event"], first["seq"], first["failed"], first["seconds"]) == ("call", 1, False, 0.5)
    assert (first["started_at"], first["arguments"], first["result"]) == (1.0, {"path": "a"}, {"content": []})
    assert (second["seq"], second["failed"], second["started_at"]) == (2, True, 2.0)


def test_a_call_without_a_reply_has_failed(tmp_path: Path) -> None:
    file = write(tmp_path / "trajectory.jsonl", {"event": "call", "time": 1.0, "seq": 1, **CALL})
    (call,) = RecordedCalls(file)
    assert (call["failed"], call["result"], call["seconds"]) == (True, NO_REPLY, 0.0)


def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "trajectory.jsonl", {"event": "call", "time": 1.0, "seq": 1, **CALL, **REPLY})
    with file.open("ab") as lines:
        lines.write(b'{"event": "call", "seq": 2, "too')
    calls = RecordedCalls(file)
    assert [call["seq"] for call in calls] == [1]
    assert list(calls) == list(calls)
