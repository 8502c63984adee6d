"""Metrics of an audit. `rubric.yaml` weights them; `main` requires the maximum of each."""

import csv
import json
from pathlib import Path

from utils.evaluation import Wrong
from utils.submission import close, read_csv, read_object


def evaluate(workspace: Path, groundtruth: Path) -> dict[str, float | bool]:
    """Return the metrics of an attempt.

    `found` is the share of the violations that the attempt reports, minus one violation for each false alarm.
    `exact` is whether it reports all of them in order and nothing else. `claimed_total` and `approved_total`
    are whether the sums are correct.
    """
    with (groundtruth / "findings.csv").open(newline="") as file:
        expected = list(csv.reader(file))[1:]
    totals = json.loads((groundtruth / "totals.json").read_text())
    reported = findings(workspace)
    sums = claimed_sums(workspace, set(totals))
    reported_set = {tuple(row) for row in reported}
    expected_set = {tuple(row) for row in expected}
    return {
        "found": max(0, len(reported_set & expected_set) - len(reported_set - expected_set))
        / len(expected_set),
        "exact": reported == expected,
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
