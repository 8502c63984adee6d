"""The results as Markdown: one section for each part in one file."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.report import table
from benchmarks.survival.cost import PATHS, Cost
from benchmarks.survival.deaths import Deaths
from benchmarks.survival.kills import Kills
from benchmarks.survival.soak import Soak

INTRODUCTION = """\
# Survival

What `python -m benchmarks.survival` measured last. Every part has servers of its own with the tests' suite;
killed means SIGKILL.
"""
TITLES = {
    "kills": "Episodes that play while their server is killed",
    "deaths": "Deaths in every phase of an episode",
    "soak": "Thousands of short episodes",
    "cost": "The cost of the store",
}


def section(part: str, provider: str, machine: dict[str, str], body: str) -> str:
    """One part's result, with the machine that it was measured on."""
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    return f"## {TITLES[part]} ({provider})\n\n{facts}\n\n{body}\n"


def write_section(file: Path, text: str) -> None:
    """Replace the section with the same heading, or append it."""
    old = file.read_text() if file.exists() else INTRODUCTION
    introduction, *sections = old.split("\n## ")
    heading = text.partition("\n")[0].removeprefix("## ")
    kept = [one.strip() for one in sections if one.partition("\n")[0] != heading]
    parts = [introduction.strip(), *(f"## {one}" for one in kept), text.strip()]
    file.write_text("\n\n".join(parts) + "\n")


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
    left = [
        (f"after deaths of: {victim}", str(leftovers)) for victim, leftovers in measured.leftovers.items()
    ]
    by_moment = table(("victim and moment", "continued", "forfeited", "lost"), rows)
    missed = f"Moments at which there was no driver to kill: {measured.missed}; they are not counted."
    return "\n\n".join((by_moment, missed, table(("left behind", ""), left), *measured.errors))


def soak(measured: Soak) -> str:
    steady = measured.steady
    first, last = steady[0], steady[-1]
    memory = measured.slope([sample.memory_mib for sample in steady])
    descriptors = measured.slope([sample.descriptors for sample in steady])
    rows = [
        ("episodes", f"{measured.endings.total():,}, {measured.at_once} at once"),
        *((f"ending: {ending}", f"{count:,}") for ending, count in measured.endings.items()),
        ("episodes per second", f"{measured.endings.total() / measured.seconds:.1f}"),
        ("memory after the first tenth, MiB", f"{first.memory_mib:.1f}"),
        ("memory at the end, MiB", f"{last.memory_mib:.1f}"),
        ("growth of memory per 1,000 episodes, MiB", f"{memory:+.2f}"),
        ("descriptors after the first tenth", str(first.descriptors)),
        ("descriptors at the end", str(last.descriptors)),
        ("growth of descriptors per 1,000 episodes", f"{descriptors:+.2f}"),
        ("episodes open a lease later", str(measured.open_at_end)),
    ]
    if measured.leftovers is not None:
        rows.append(("left behind", str(measured.leftovers)))
    return "\n\n".join((table(("quantity", "value"), rows), *measured.errors[:20]))


def cost(measured: Cost) -> str:
    rows = [
        (
            path,
            *(f"{measured.samples[path, survives].p50 * 1e3:.2f}" for survives in (False, True)),
            f"**{measured.ratio(path):.3f}**",
        )
        for path in PATHS
    ]
    return table(("a call of 100 bytes, p50", "without a store, ms", "with a store, ms", "ratio"), rows)
