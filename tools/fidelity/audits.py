"""Puts what `decathlon-mcp audit --json` found at Toolathlon's tasks into `benchmarks/results/audit.json`.

    python -m tools.fidelity.audits CHECKOUT AUDIT.json [AUDIT.json ...]
    python -m tools.fidelity.audits decathlon_mcp/starter/suite AUDIT.json --release starter

A later file replaces what an earlier one has of the same task, and all of them what the results have of it.
`--not-audited TASK REASON` gives a task its row that was not audited.
`docs/tables.py` writes docs/results/audit.md from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from decathlon_mcp.plugins.audit.attacks import attacks
from decathlon_mcp.plugins.audit.report import (
    DEFAULT_POLICIES,
    INTERRUPTED,
    OF_THE_SERVER,
    PAYS_ALREADY,
    VERDICTS,
    TaskReport,
)
from decathlon_mcp.suites.loading import load_suite
from tools.fidelity.results import REVISION_CHARACTERS, release_of

FILE = Path(__file__).parents[2] / "benchmarks/results/audit.json"
HEAD = ("task", "verdict", "what was found", "attempts", "attacks", "remarks")
COST_HEAD = {
    "set-up, s": "set_up_seconds",
    "its CPU, s": "set_up_cpu_seconds",
    "a call, s": "call_seconds",
    "the call's CPU, s": "call_cpu_seconds",
    "grading, s": "grading_seconds",
    "the grading's CPU, s": "grading_cpu_seconds",
    "memory, MiB": "memory_mib",
}
_ALONE = "forger "


class AuditedTask(BaseModel):
    """What an audit found at a task. `attacks`: how many, by what became of them."""

    revision: str
    date: str
    verdict: str
    findings: list[str]
    attempts: int
    attacks: dict[str, int]
    not_checked: dict[str, str]
    notes: list[str]
    not_tried: list[str]
    """Policies that were not chosen."""
    cost: dict[str, float | None] | None


class AuditedRelease(BaseModel):
    """The audited tasks. `seconds`: what one audit of all of them took, which began with nothing."""

    tasks: dict[str, AuditedTask] = {}
    seconds: float | None = None


Audits = dict[str, AuditedRelease]
"""By release."""
_AUDITS = TypeAdapter(Audits)


def read() -> Audits:
    return _AUDITS.validate_json(FILE.read_bytes()) if FILE.exists() else {}


def audited(task: Mapping[str, Any], policies: Sequence[str], revision: str) -> AuditedTask:
    """What the JSON of an audit has of a task."""
    not_checked: dict[str, str] = task["not_checked"]
    reasons = [why for name, why in not_checked.items() if name.startswith(_ALONE)]
    became = Counter(map(_what_became, reasons))
    became["carried out"] = 0 if task["unplayable"] else len(attacks()) - len(reasons)
    return AuditedTask(
        revision=revision,
        date=date.today().isoformat(),
        verdict=task["verdict"],
        findings=[finding["what"] for finding in task["findings"]],
        attempts=len(task["rewards"]),
        attacks=dict(sorted(became.items())),
        not_checked={name: why for name, why in not_checked.items() if not name.startswith(_ALONE)},
        notes=[*task["notes"], *([task["unplayable"]] if task["unplayable"] else [])],
        not_tried=[policy for policy in DEFAULT_POLICIES if policy not in policies],
        cost=task["cost"],
    )


def _what_became(reason: str) -> str:
    if reason.startswith(OF_THE_SERVER):
        return "at another task"
    return {INTERRUPTED: "no time", PAYS_ALREADY: "needless"}.get(reason, "do not fit")


def rows(release: Mapping[str, AuditedTask]) -> Iterator[tuple[str, ...]]:
    """The rows of a release's table, failures first."""
    for name, task in sorted(release.items(), key=lambda item: (VERDICTS.index(item[1].verdict), item[0])):
        became = [
            f"{count} {what}"
            for what, count in task.attacks.items()
            if what in ("carried out", "no time", "needless")
        ]
        remarks = [*task.notes, *(f"{name} not checked: {why}" for name, why in task.not_checked.items())]
        remarks += [f"not tried: {', '.join(task.not_tried)}"] if task.not_tried else []
        yield (
            f"`{name}`",
            task.verdict,
            "; ".join(task.findings) or "–",
            str(task.attempts),
            ", ".join(became),
            "; ".join(remarks) or "–",
        )


def cost_rows(release: Mapping[str, AuditedTask]) -> Iterator[tuple[str, ...]]:
    """What the tasks of a release cost."""
    for name, task in release.items():
        if (cost := task.cost) is not None:
            parts = (
                f"{part}{kind}seconds" for part in ("set_up_", "call_", "grading_") for kind in ("", "cpu_")
            )
            yield (f"`{name}`", *map(_rounded, map(cost.get, (*parts, "memory_mib"))))


def _rounded(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fidelity.audits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", type=Path, metavar="AUDIT.json")
    parser.add_argument("--not-audited", nargs=2, action="append", default=[], metavar=("TASK", "REASON"))
    parser.add_argument("--release", help="name of the results [the checkout's release]")
    parser.add_argument("--revision", help="commit of the checkout, if that is a copy without history")
    arguments = parser.parse_args()
    suite = load_suite(str(arguments.checkout))
    revision = (arguments.revision or suite.revision)[:REVISION_CHARACTERS]
    audits = read()
    release = audits.setdefault(arguments.release or release_of(suite), AuditedRelease())
    for file in arguments.files:
        document: dict[str, Any] = json.loads(file.read_text("utf-8"))
        new = {task["task"]: audited(task, document["policies"], revision) for task in document["tasks"]}
        is_whole = document.get("known_before") == 0 and new.keys() >= release.tasks.keys()
        release.seconds = document["seconds"] if is_whole else None
        release.tasks |= new
    for name, reason in arguments.not_audited:
        row = TaskReport(task=name, unplayable=reason)
        release.tasks[name] = audited(row.to_json(lambda _: ""), DEFAULT_POLICIES, revision)
    release.tasks = dict(sorted(release.tasks.items()))
    ordered = dict(sorted(audits.items(), reverse=True))
    FILE.write_bytes(_AUDITS.dump_json(ordered, indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
