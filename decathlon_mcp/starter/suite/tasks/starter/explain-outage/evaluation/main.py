"""Checks the last line of the final answer: deployment, duration and number of failed requests."""

import json
import re

from utils.evaluation import Attempt, judge, require
from utils.trajectory import final_answer

LINE = re.compile(r"OUTAGE: (d-[0-9]{1,6}) ([0-9]{1,6}) min ([0-9]{1,6}) failed")


def check(attempt: Attempt) -> None:
    expected = json.loads((attempt.groundtruth / "outage.json").read_text())
    answer = final_answer(attempt.log)
    lines = [line.strip(" \t\r`*") for line in answer.splitlines() if line.strip(" \t\r`*")]
    require(answer.count("OUTAGE:") == 1, "the answer must have one OUTAGE line, not several to choose from")
    match = LINE.fullmatch(lines[-1])
    require(match is not None, "the answer does not end with an OUTAGE line of the required form")
    deployment, minutes, failed = match.groups()
    require(deployment == expected["deployment"], "another deployment caused the outage")
    require(int(minutes) == expected["minutes"], "the outage did not last that long")
    require(int(failed) == expected["failed"], "another number of requests failed")


if __name__ == "__main__":
    judge(check)
