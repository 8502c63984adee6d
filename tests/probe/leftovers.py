"""Finds processes that a server did not stop."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processes_marked(state: Path) -> list[str]:
    """Return the command lines of processes that refer to the state folder.

    A process refers to it by its arguments, working directory or environment.
    """
    path = str(state).encode()
    commands: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # A process may end while it is inspected.
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            folder = str((process / "cwd").readlink()).encode()
            if path in command or path in folder or path in (process / "environ").read_bytes():
                commands.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return commands
