"""Runs the command as a user does, in an empty folder and without settings."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest

from decathlon_mcp.cli.app import run
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.cli.supervisor import applies
from tests.cli.forking import COMMAND_SECONDS, ForkingServer

COMMAND = (sys.executable, "-m", "decathlon_mcp.cli")


class Commands(ABC):
    """Runs commands until they end."""

    @abstractmethod
    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command. `variables`: of the environment."""

    def error(self, *arguments: str, status: int, **variables: str) -> str:
        """Run a command that must fail, and return its one-line message."""
        done = self.run(*arguments, **variables)
        assert done.returncode == status, done
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith("decathlon-mcp: ")
        return line.removeprefix("decathlon-mcp: ")


@dataclass(frozen=True, slots=True)
class Shell(Commands):
    """Runs commands in processes, in a folder with an environment."""

    folder: Path
    environment: dict[str, str] = field(repr=False)
    forking: ForkingServer = field(repr=False)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
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


@dataclass(frozen=True, slots=True)
class InProcess(Commands):
    """Runs commands in this process, which has imported their modules; no other command runs meanwhile."""

    output: Callable[[], tuple[str, str]]

    def run(self, *arguments: str, given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """`given`: what the command reads from stdin."""
        self.output()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", StringIO(given))
            for name, value in variables.items():
                patch.setenv(name, value)
            status = run(arguments)
        return subprocess.CompletedProcess(arguments, status, *self.output())


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


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> InProcess:
    """Commands in an empty folder without settings, with a state folder of their own."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return InProcess(capsys.readouterr)
