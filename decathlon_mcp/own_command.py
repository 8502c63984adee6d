"""How a shell finds the programs of this environment."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

PROGRAM = "decathlon-mcp"


def this_command(program: str = PROGRAM, *, anywhere: bool = False) -> str:
    """A program of this environment, by its name if it is on the PATH, or else by its path.

    For a shell in this folder, or `anywhere` on this machine.
    """
    path = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    is_found = found is not None and Path(found).absolute() == path
    return program if is_found else shell_path(path, anywhere=anywhere)


def shell_path(path: Path, *, anywhere: bool = False) -> str:
    """A path for a shell in this folder, or `anywhere`, as short as it can be written."""
    if not anywhere and path.is_relative_to(Path.cwd()):
        return shlex.quote(str(path.relative_to(Path.cwd())))
    if path.is_relative_to(Path.home()):
        return f"~/{shlex.quote(str(path.relative_to(Path.home())))}"
    return shlex.quote(str(path))
