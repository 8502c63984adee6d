"""A clock that is never set, for spans that may begin in one server and end in the next."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Instant:
    """A time on this machine. `seconds`: since its start, sleep included. `boot`: which start that was."""

    boot: str
    seconds: float

    @classmethod
    def now(cls) -> Instant:
        return cls(_boot(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def until(self, later: Instant) -> float | None:
        """Seconds from this to the later one; None if the machine was started again in between."""
        return later.seconds - self.seconds if self.boot and self.boot == later.boot else None


@cache
def _boot() -> str:
    try:
        return BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
