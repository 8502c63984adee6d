"""What is printed on a terminal controls nothing there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.cli.output import print_table
from decathlon_mcp.cli.terminal import Terminal
from tests.cli.conftest import COMMAND

EVIL = "\x1b]0;owned\x07\r\x9b2J"


def test_no_text_of_others_controls_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    ScriptConsole().reply(f"{EVIL}\n{EVIL}", failed=True)
    table = Table()
    table.add_row(EVIL)
    Terminal().print(table)
    printed = capsys.readouterr().out
    assert printed.count("]0;owned") == 3
    assert not re.search(r"\x1b\]|[\x07\r\x9b]", printed)


def test_a_table_without_lines_is_nothing_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("task", "verdict"), iter([("a", "sound")]))
    assert "verdict" in capsys.readouterr().out
    print_table(("task", "verdict"), iter(()))
    assert capsys.readouterr().out == ""


def test_columns_without_text_take_no_place_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "42")
    line = ("4f091f9122510de9", "", "tune-reactor", "ended", "")
    print_table(("episode", "token", "task", "phase", "server pid"), [line])
    headings, cells = capsys.readouterr().out.splitlines()
    assert "token" not in headings
    assert cells.split() == [cell for cell in line if cell]


def test_marks_that_the_encoding_lacks_are_escaped() -> None:
    done = subprocess.run(
        [*COMMAND, "doctor", "--suite", "missing"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"\\u2717   suite missing: " in done.stdout
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    (suite := tmp_path / "fünf 😀").mkdir()
    done = subprocess.run(
        [*COMMAND, "doctor", "--json", "--suite", str(suite)],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    assert any(str(suite) in finding["detail"] for finding in findings)
