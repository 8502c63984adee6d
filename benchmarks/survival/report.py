"""The results as Markdown."""

from __future__ import annotations

import statistics

from benchmarks.report import table
from benchmarks.survival.deaths import Deaths
from benchmarks.survival.kills import Kills
from benchmarks.survival.soak import Soak


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


def soak(measured: Soak) -> str:
    steady = measured.steady
    first, last = steady[0], steady[-1]
    rows = [
        ("episodes", f"{measured.endings.total():,}, {measured.at_once} at once"),
        *((f"clients that {ending}" if ending != "failed" else "failed", f"{count:,}")
          for ending, count in measured.endings.items()),
        ("episodes per second", f"{measured.endings.total() / measured.seconds:.1f}"),
        ("memory after the first tenth, MiB", f"{first.memory_mib:.1f}"),
        ("memory at the end, MiB", f"{last.memory_mib:.1f}"),
        ("growth of memory per 1,000 episodes, MiB", f"{measured.slope([s.memory_mib for s in steady]):+.2f}"),
        ("descriptors after the first tenth", str(first.descriptors)),
        ("descriptors at the end", str(last.descriptors)),
        ("growth of descriptors per 1,000 episodes", f"{measured.slope([s.descriptors for s in steady]):+.2f}"),
        ("episodes open a lease later", str(measured.open_at_end)),
        *([("left behind", str(measured.leftovers))] if measured.leftovers else []),
    ]  # fmt: skip
    return "\n\n".join((table(("quantity", "value"), rows), *measured.errors[:20]))
