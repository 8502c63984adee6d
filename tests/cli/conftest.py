"""The command, run as a user runs it: a process of its own, in an empty folder, with no settings about."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from decathlon_mcp.cli.options import PREFIX

COMMAND = (sys.executable, "-m", "decathlon_mcp.cli")


@dataclass(frozen=True, slots=True)
class Shell:
    """Where commands are run, and with which variables."""

    folder: Path
    environment: dict[str, str] = field(repr=False)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The whole of a command that ends by itself."""
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def fault(self, *words: str, status: int, **variables: str) -> str:
        """The one line that a command fails with."""
        done = self.run(*words, **variables)
        assert done.returncode == status, done
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith("decathlon-mcp: ")
        return line.removeprefix("decathlon-mcp: ")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = tmp_path / "here"
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return Shell(folder, {**inherited, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "100"})
