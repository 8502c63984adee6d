"""Puts what `decathlon-mcp audit --json` found at Toolathlon's tasks into `benchmarks/results/audit.json`.

    python -m tools.fidelity.audits CHECKOUT AUDIT.json [AUDIT.json ...]
    python -m tools.fidelity.audits decathlon_mcp/starter/suite AUDIT.json --release starter

A later file replaces what an earlier one has of the same task, and all of them what the results have of it.
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
from decathlon_mcp.plugins.audit.report import DEFAULT_POLICIES, INTERRUPTED, OF_THE_SERVER, VERDICTS
from decathlon_mcp.suites.loading import load_suite
from tools.fidelity.results import REVISION_CHARACTERS, release_of

FILE = Path(__file__).parents[2] / "benchmarks/results/audit.json"
HEAD = ("task", "verdict", "what was found", "attempts", "attacks", "remarks", "empty attempt, s")
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
    seconds: float | None


Audits = dict[str, dict[str, AuditedTask]]
"""By release and task."""
_AUDITS = TypeAdapter(Audits)


def read() -> Audits:
    return _AUDITS.validate_json(FILE.read_bytes()) if FILE.exists() else {}


def audited(task: Mapping[str, Any], policies: Sequence[str], revision: str) -> AuditedTask:
    """What the JSON of an audit has of a task that could be played."""
    not_checked: dict[str, str] = task["not_checked"]
    reasons = [why for name, why in not_checked.items() if name.startswith(_ALONE)]
    became = Counter(map(_what_became, reasons))
    became["carried out"] = len(attacks()) - len(reasons)
    cost: Mapping[str, float] | None = task["cost"]
    return AuditedTask(
        revision=revision,
        date=date.today().isoformat(),
        verdict=task["verdict"],
        findings=[finding["what"] for finding in task["findings"]],
        attempts=len(task["rewards"]),
        attacks=dict(sorted(became.items())),
        not_checked={name: why for name, why in not_checked.items() if not name.startswith(_ALONE)},
        notes=task["notes"],
        not_tried=[policy for policy in DEFAULT_POLICIES if policy not in policies],
        seconds=None if cost is None else round(cost["grading_seconds"], 1),
    )


def _what_became(reason: str) -> str:
    if reason.startswith(OF_THE_SERVER):
        return "at another task"
    return "no time" if reason == INTERRUPTED else "do not fit"


def rows(release: Mapping[str, AuditedTask]) -> Iterator[tuple[str, ...]]:
    """The rows of a release's table, failures first."""
    for name, task in sorted(release.items(), key=lambda item: (VERDICTS.index(item[1].verdict), item[0])):
        became = [
            f"{count} {what}" for what, count in task.attacks.items() if what in ("carried out", "no time")
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
            "–" if task.seconds is None else f"{task.seconds:g}",
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fidelity.audits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="+", type=Path, metavar="AUDIT.json")
    parser.add_argument("--release", help="name of the results [the checkout's release]")
    parser.add_argument("--revision", help="commit of the checkout, if that is a copy without history")
    arguments = parser.parse_args()
    suite = load_suite(str(arguments.checkout))
    revision = (arguments.revision or suite.revision)[:REVISION_CHARACTERS]
    audits = read()
    release = audits.setdefault(arguments.release or release_of(suite), {})
    for file in arguments.files:
        document: dict[str, Any] = json.loads(file.read_text("utf-8"))
        for task in document["tasks"]:
            if not task["unplayable"]:
                release[task["task"]] = audited(task, document["policies"], revision)
    ordered = {name: dict(sorted(tasks.items())) for name, tasks in sorted(audits.items(), reverse=True)}
    FILE.write_bytes(_AUDITS.dump_json(ordered, indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
