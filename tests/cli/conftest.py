"""Runs the command as a user does, in an empty folder and without settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from decathlon_mcp import cli
from decathlon_mcp.cli.command_line import command_line
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.cli.supervisor import applies
from decathlon_mcp.settings import default_state
from tests.forks import in_fork

COMMAND = (sys.executable, "-m", "decathlon_mcp.cli")


COMMAND_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands until they end, in a folder with an environment."""

    folder: Path
    environment: dict[str, str] = field(repr=False)

    def run(self, *arguments: str, given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command. `given`: what it reads from stdin. `variables`: of the environment."""
        environment = {**self.environment, **variables}
        # A supervisor starts its server as it was started itself. What a machine can do is found out once in
        # a process: for `doctor`, not before it starts.
        if not applies(arguments) and "doctor" not in arguments:
            command_line()
            run = partial(_main, arguments)
            return in_fork(run, folder=self.folder, environment=environment, given=given)
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env=environment,
            input=given,
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

    def check_printed(self, command: str) -> None:
        """Assert that a shell finds a command as it was printed."""
        helped = subprocess.run(
            f"{command} --help",
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            check=False,
        )
        assert helped.returncode == 0, helped


def _main(arguments: Sequence[str]) -> None:
    """As `python -m decathlon_mcp.cli`, with the folder and the environment of this process."""
    for module in tuple(sys.modules.values()):
        for name, value in tuple(vars(module).items()):
            if name.endswith("_DEFAULTS") and hasattr(value, "state"):
                vars(value)["state"] = default_state()
    sys.path[0] = str(Path.cwd())
    sys.argv[1:] = arguments
    sys.orig_argv[1:] = ["-m", cli.__name__, *arguments]
    cli.main()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = tmp_path / "here"
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return Shell(folder, {**inherited, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "100"})
