"""Metrics of an order. `rubric.yaml` weights them; `main` requires the maximum of each."""

from pathlib import Path

from utils.evaluation import Wrong
from utils.submission import read_csv

HEADER = ["product", "quantity"]


def evaluate(workspace: Path, groundtruth: Path) -> dict[str, float | bool]:
    """Return the metrics of an attempt.

    `ordered` is the share of the expected lines that the order has, minus one line for each other one.
    `complete` is whether the order is the expected one.
    """
    expected = lines(groundtruth)
    order = lines(workspace)
    return {
        "ordered": max(0, len(order & expected) - len(order - expected)) / len(expected),
        "complete": order == expected,
    }


def lines(folder: Path) -> set[tuple[str, ...]]:
    """Return the lines of order.csv; none if it cannot be read."""
    try:
        return {tuple(row) for row in read_csv(folder, "order.csv", HEADER)}
    except Wrong as wrong:
        print(wrong)
        return set()
