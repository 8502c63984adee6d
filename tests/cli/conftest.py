"""Runs the command as a user does: in its own process, in an empty folder, without settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.cli.supervisor import applies
from tests.cli.forking import COMMAND_SECONDS, ForkingServer

COMMAND = (sys.executable, "-m", "decathlon_mcp.cli")


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands in a folder with an environment."""

    folder: Path
    environment: dict[str, str] = field(repr=False)
    forking: ForkingServer = field(repr=False)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command until it ends."""
        environment = {**self.environment, **variables}
        # A supervisor starts its server as it was started itself, and imports little before that.
        if not applies(arguments):
            return self.forking.run(arguments, self.folder, environment)
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
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


@pytest.fixture(scope="session")
def forking() -> Generator[ForkingServer]:
    server = ForkingServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def shell(tmp_path: Path, forking: ForkingServer) -> Shell:
    folder = tmp_path / "here"
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return Shell(folder, {**inherited, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "100"}, forking)
