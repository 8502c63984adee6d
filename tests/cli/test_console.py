"""What is printed on a terminal controls nothing there."""

from __future__ import annotations

import re

import pytest
from rich.table import Table

from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.cli.terminal import Terminal

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
