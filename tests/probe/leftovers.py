"""What is left of a server: processes of its sandboxes, wherever they hang, and containers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processes_marked(state: Path) -> list[str]:
    """Command lines of processes that live in, or were started for, that state folder."""
    mark = str(state).encode()
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            where = str((process / "cwd").readlink()).encode()
            if mark in command or mark in where or mark in (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found
