"""Passes if every metric is at its maximum; `rubric.yaml` gives partial credit."""

from utils.evaluation import Attempt, judge, require

from .evaluator import evaluate


def check(attempt: Attempt) -> None:
    for name, value in evaluate(attempt.workspace, attempt.groundtruth).items():
        require(value == 1, f"{name} is {value:.2f} of 1.00")


if __name__ == "__main__":
    judge(check)
