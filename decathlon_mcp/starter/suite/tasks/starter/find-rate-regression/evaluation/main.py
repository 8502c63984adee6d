"""Checks that one new commit on `main` repairs the rate and that the finding names the faulty commit."""

import json

from utils.evaluation import Attempt, judge, require
from utils.repository import open_repository
from utils.submission import read_object


def check(attempt: Attempt) -> None:
    known = json.loads((attempt.groundtruth / "commits.json").read_text())
    finding = read_object(attempt.workspace, "finding.json", {"commit", "zone", "field", "value"})
    require(finding["commit"] == known["culprit"], "finding.json names another commit")
    expected = {"zone": "islands", "field": "per_kg", "value": 465}
    require(
        {name: finding[name] for name in expected} == expected,
        "finding.json names another zone, field or value",
    )

    with open_repository(attempt.workspace, "repository") as repository:
        tip = repository.branch("main")
        require(tip.id != known["tip"], "nothing was committed to main")
        require(tip.parents == (known["tip"],), "main is not exactly one commit ahead of where it was")
        require(tip.changed == ("rates.json",), f"the commit changes {', '.join(tip.changed) or 'nothing'}")
        text = repository.text(tip.id, "rates.json")
    try:
        rates = json.loads(text)
    except (ValueError, RecursionError):
        rates = None
    expected_rates = json.loads((attempt.groundtruth / "rates.json").read_text())
    require(rates == expected_rates, "rates.json, as committed, is not the list with that one rate repaired")


if __name__ == "__main__":
    judge(check)
