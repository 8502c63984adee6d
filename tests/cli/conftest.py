"""Runs the command as a user does: in its own process, in an empty folder, without settings."""

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
    """Runs commands in a folder with an environment."""

    folder: Path
    environment: dict[str, str] = field(repr=False)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command until it ends."""
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def error(self, *arguments: str, status: int, **variables: str) -> str:
        """Run a command that must fail, and return its one-line message."""
        done = self.run(*arguments, **variables)
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
