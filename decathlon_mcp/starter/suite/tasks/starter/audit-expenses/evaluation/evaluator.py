"""Metrics of an audit: the rubric weighs them, and `main` passes or fails the attempt by them."""

import csv
import json
from pathlib import Path

from utils.evaluation import Wrong
from utils.leftovers import close, read_csv, read_object


def evaluate(workspace: Path, groundtruth: Path) -> dict[str, float | bool]:
    """`found`: the share of the broken rules that were found, each false alarm taking one away; `exact`: all
    of them and nothing else, in order; `claimed_total`, `approved_total`: the two sums.
    """
    with (groundtruth / "findings.csv").open(newline="") as file:
        wanted = list(csv.reader(file))[1:]
    totals = json.loads((groundtruth / "totals.json").read_text())
    said = findings(workspace)
    sums = claimed_sums(workspace, set(totals))
    pairs = {tuple(row) for row in said}
    right = {tuple(row) for row in wanted}
    return {
        "found": max(0, len(pairs & right) - len(pairs - right)) / len(right),
        "exact": said == wanted,
        "claimed_total": close(sums.get("claimed_eur"), totals["claimed_eur"]),
        "approved_total": close(sums.get("approved_eur"), totals["approved_eur"]),
    }


def findings(workspace: Path) -> list[list[str]]:
    """Return the rows of findings.csv; no rows if it cannot be read."""
    try:
        return read_csv(workspace, "findings.csv", ["id", "rule"])
    except Wrong as wrong:
        print(wrong)
        return []


def claimed_sums(workspace: Path, fields: set[str]) -> dict[str, object]:
    """Return the fields of totals.json; no fields if it cannot be read."""
    try:
        return read_object(workspace, "totals.json", fields)
    except Wrong as wrong:
        print(wrong)
        return {}
