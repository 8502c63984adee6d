"""The results as Markdown."""

from __future__ import annotations

import statistics

from benchmarks.survival.kills import Kills
from benchmarks.report import table


def kills(measured: Kills) -> str:
    waits = measured.next_reply_seconds
    rows = [
        ("kills", str(len(measured.killed_at))),
        ("calls", str(measured.calls)),
        ("calls in flight at a kill", str(measured.in_flight)),
        ("rewards of 1.0", f"{measured.rewarded} of {len(measured.plays)}"),
        ("episodes in which each call ran once", f"{measured.ran_once} of {len(measured.plays)}"),
        ("episodes lost", str(len(measured.lost))),
        ("from a kill to the next reply: median, s", f"{statistics.median(waits):.2f}"),
        ("from a kill to the next reply: longest, s", f"{max(waits):.2f}"),
        ("left behind", str(measured.leftovers)),
        *(("lost", error) for error in measured.lost),
    ]
    return table(("quantity", "value"), rows)
