"""Finds processes that a server did not stop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes_marked(state: Path) -> list[str]:
    """Return the command lines of processes that refer to the state folder.

    A process refers to it by its arguments, working directory or environment.
    """
    return [
        command.replace(b"\0", b" ").decode(errors="replace")
        for _, command, place in _processes()
        if bytes(state) in command or bytes(state) in place
    ]


def processes_by_sandbox(folder: Path) -> dict[str, set[int]]:
    """The processes of each sandbox without isolation whose folder is in this one, by its name.

    They are those with their working directory or their TMPDIR there.
    """
    pattern = re.compile(rb"(?:^|=)" + re.escape(bytes(folder)) + rb"/([^/\0]+)/(?:root|tmp)")
    found: dict[str, set[int]] = {}
    for pid, _, place in _processes():
        # One whose main thread has ended has neither; nor does one that has ended.
        if match := pattern.search(place):
            found.setdefault(match[1].decode(), set()).add(pid)
    return found


def processes_in_group(name: str) -> set[int]:
    """The processes in control groups whose name ends so."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(line.endswith(name) for line in (process / "cgroup").read_text().splitlines()):
                found.add(int(process.name))
    return found


def _processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Each process with its command line, and its working directory with its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end while it is inspected.
        with suppress(OSError):
            place = bytes((process / "cwd").readlink()) + b"\0" + beginning(process / "environ")
            yield int(process.name), beginning(process / "cmdline"), place


def beginning(file: Path) -> bytes:
    """Up to 1 MiB: a process can claim any length."""
    with file.open("rb") as content:
        return content.read(1 << 20)
