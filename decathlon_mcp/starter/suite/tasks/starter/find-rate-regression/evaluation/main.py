"""Checks for one commit on `main` that repairs the rate, and a finding that names the commit that broke it."""

import json

from utils.evaluation import Attempt, judge, require
from utils.leftovers import read_object
from utils.repository import open_repository


def check(attempt: Attempt) -> None:
    known = json.loads((attempt.groundtruth / "commits.json").read_text())
    finding = read_object(attempt.workspace, "finding.json", {"commit", "zone", "field", "value"})
    require(finding["commit"] == known["culprit"], "finding.json names another commit")
    right = {"zone": "islands", "field": "per_kg", "value": 465}
    require(
        {name: finding[name] for name in right} == right, "finding.json names another zone, field or value"
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
    wanted = json.loads((attempt.groundtruth / "rates.json").read_text())
    require(rates == wanted, "rates.json, as committed, is not the list with that one rate repaired")


if __name__ == "__main__":
    judge(check)
