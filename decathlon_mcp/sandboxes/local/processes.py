"""The processes of one local sandbox, found in /proc: by their marker, their session, their ancestors."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARKER_VARIABLE = "DECATHLON_SANDBOX"
"""In the environment of every process of a sandbox: `<owner>/<name>`."""

_MARKER = re.compile(rb"(?:^|\0)" + MARKER_VARIABLE.encode() + rb"=([^\0/]*)/([^\0]*)")
_STOPPED = frozenset("tT")
_DEAD = frozenset("ZXx")


@dataclass(frozen=True, slots=True)
class _Seen:
    parent: int
    session: int
    state: str


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """Every process with the marker `<owner>/<name>`, in the leader's session, or descended from such.

    One that forgets its environment and leaves both session and parents behind is not found: `local`
    isolates nothing. `leader` is the first process, where it is known: not yet reaped, so that its number
    is nobody else's.
    """

    owner: str
    name: str
    leader: int | None = None

    def freeze(self) -> None:
        """Stop them all (SIGSTOP), those too that are made meanwhile."""
        for _ in range(100):
            running = [number for number, seen in self._find().items() if seen.state not in _STOPPED]
            if not running:
                return
            _signal(running, signal.SIGSTOP)
            time.sleep(0.001)

    def kill(self, *, seconds: float = 5.0) -> bool:
        """Kill them all; are they gone? What has been stopped first cannot fork away."""
        self.freeze()
        until = time.monotonic() + seconds
        while found := self._find():
            _signal(found, signal.SIGKILL)
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def _find(self) -> dict[int, _Seen]:
        everyone = _everyone()
        marker = f"{self.owner}/{self.name}"
        ours = {
            number
            for number, seen in everyone.items()
            if self.leader in (number, seen.session) or marker_of(number) == marker
        }
        grown = True
        while grown:
            more = {number for number, seen in everyone.items() if seen.parent in ours} - ours
            ours |= more
            grown = bool(more)
        return {number: everyone[number] for number in ours if everyone[number].state not in _DEAD}


def marked(owner: str) -> set[str]:
    """The names of this owner's sandboxes that have a process."""
    markers = (marker_of(number) for number in _everyone())
    return {marker.partition("/")[2] for marker in markers if marker and marker.partition("/")[0] == owner}


def marker_of(number: int) -> str | None:
    """`<owner>/<name>` of a process, None for one of no sandbox (or not ours to look at)."""
    try:
        found = _MARKER.search(Path(f"/proc/{number}/environ").read_bytes())
    except OSError:
        return None
    return found and (found[1] + b"/" + found[2]).decode("utf-8", "replace")


def _everyone() -> dict[int, _Seen]:
    own = os.getpid()
    numbers = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return {number: seen for number in numbers if number != own and (seen := _look(number))}


def _look(number: int) -> _Seen | None:
    try:
        said = Path(f"/proc/{number}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    state, parent, _group, session = said.rpartition(")")[2].split()[:4]
    return _Seen(int(parent), int(session), state)


def _signal(numbers: list[int] | dict[int, _Seen], which: signal.Signals) -> None:
    for number in numbers:
        try:
            os.kill(number, which)
        except (ProcessLookupError, PermissionError):
            continue
