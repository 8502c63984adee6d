"""The journal of an episode."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest

from decathlon_mcp.storage.journal import Journal


def test_events_are_read_back_as_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "episodes" / "one")
    journal.add("call", seq=1, result={"text": "ü\n\ud800"})
    journal.add("claim", answer=None)
    journal.add("call", seq=2, result=None)
    assert [event["seq"] for event in journal.events("call")] == [1, 2]
    assert next(journal.events("call"))["result"]["text"] == "ü\n\ud800"
    journal.close()


def test_event_added_after_close_is_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    journal.add("call", seq=1)
    journal.close()
    journal.add("call", seq=2)
    assert [event["seq"] for event in journal.events("call")] == [1]


def test_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    assert journal.folder.stat().st_mode & 0o077 == 0
    journal.close()


def test_truncated_line_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    with (journal.folder / "trajectory.jsonl").open("ab") as trajectory:
        trajectory.write(b'{"event": "call", "seq": 1\n[1]\n')
    journal.add("call", seq=2)
    assert [event["seq"] for event in journal.events("call")] == [2]
    journal.close()


def test_failing_disk_costs_a_line_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "one")

    class FullDisk:
        closed = False

        def write(self, line: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(journal, "_trajectory", FullDisk())
        journal.add("call", seq=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    journal.close()


def test_verdict_is_replaced_atomically(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    journal.write_verdict({"reward": 1.0})
    journal.write_verdict({"reward": 0.0})
    assert json.loads((tmp_path / "one" / "verdict.json").read_text()) == {"reward": 0.0}
    assert sorted(file.name for file in journal.folder.iterdir()) == ["trajectory.jsonl", "verdict.json"]
    journal.close()
