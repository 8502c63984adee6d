"""Logs and the journal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.telemetry.logs import configure_logging, fields


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_for_people_has_its_fields_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    logging.getLogger("decathlon.test").info(
        "episode ended", extra=fields(episode="abc", why="its time is over")
    )
    written = capsys.readouterr().err
    assert written.endswith('info    episode ended episode=abc why="its time is over"\n')
    assert sys.stdout.closed is False


def test_a_line_for_programs_is_json_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("decathlon.test").exception("it failed", extra=fields(count=2))
    out, err = capsys.readouterr()
    assert out == ""
    line = json.loads(err)
    assert (line["message"], line["level"], line["count"]) == ("it failed", "error", 2)
    assert "ValueError: no" in line["exception"]


def test_a_journal_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "episodes" / "one")
    journal.add("call", seq=1, result={"text": "ü\n\ud800"})
    journal.add("claim", answer=None)
    journal.add("call", seq=2, result=None)
    assert [event["seq"] for event in journal.events("call")] == [1, 2]
    assert next(journal.events("call"))["result"]["text"] == "ü\n\ud800"
    journal.close()
    journal.add("call", seq=3)
    assert len(list(journal.events("call"))) == 2
    assert journal.folder.stat().st_mode & 0o077 == 0


def test_a_verdict_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    journal.write_verdict({"reward": 1.0})
    journal.write_verdict({"reward": 0.0})
    assert json.loads((tmp_path / "one" / "verdict.json").read_text()) == {"reward": 0.0}
    assert sorted(file.name for file in journal.folder.iterdir()) == ["trajectory.jsonl", "verdict.json"]
    journal.close()
