"""The console of `demo`: lines on a terminal and in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from rich.table import Table

from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.cli.terminal import Terminal
from tests.cli.conftest import Shell

TEXT = "Find the recipe for tomorrow's batch, by experiment."
EVIL = "\x1b]0;owned\x07\r\x9b2J"
ADDRESS = f"http://127.0.0.1:8765/episodes/{'c' * 48}/mcp"


@pytest.mark.parametrize("terminal", [True, False])
def test_long_lines_break_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = ScriptConsole()
    console.prompt(TEXT)
    console.line("episode", ADDRESS)
    console.call("lab__run_simulation", {"name": "too-hot", "temperature": 61})
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert ADDRESS in printed
    lines = [line.rstrip() for line in printed.splitlines()]
    if not terminal:
        assert f"  prompt    {TEXT}" in lines
        return
    assert lines[:2] == ["  prompt    Find the recipe for", "            tomorrow's batch, by"]
    assert lines[-3:] == [
        '  → lab__run_simulation {"name":',
        '            "too-hot", "temperature":',
        "            61}",
    ]


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


def test_standard_streams_that_are_closed_are_no_descriptors_of_the_event_loop(shell: Shell) -> None:
    program = "import os, sys; from decathlon_mcp.cli import main\ntry: main()\nfinally: os.fstat(0)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        cwd=shell.folder,
        env=shell.environment,
        preexec_fn=lambda: os.close(0),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
