"""Finds processes that a server left behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processes_marked(state: Path) -> list[str]:
    """Command lines of the processes whose arguments, working folder or environment name the state folder."""
    mark = str(state).encode()
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # A process may end while it is inspected.
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            folder = str((process / "cwd").readlink()).encode()
            if mark in command or mark in folder or mark in (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found
