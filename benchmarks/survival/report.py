"""The results as Markdown."""

from __future__ import annotations

import statistics

from benchmarks.report import table
from benchmarks.survival.deaths import Deaths
from benchmarks.survival.kills import Kills


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


def deaths(measured: Deaths) -> str:
    rows = [
        (f"{victim}, {moment}", *(str(outcomes[of]) for of in ("continued", "forfeited", "lost")))
        for (victim, moment), outcomes in measured.outcomes.items()
    ]
    left = [(f"after deaths of: {victim}", str(leftovers)) for victim, leftovers in measured.leftovers.items()]
    by_moment = table(("victim and moment", "continued", "forfeited", "lost"), rows)
    return "\n\n".join((by_moment, table(("left behind", ""), left), *measured.errors))
