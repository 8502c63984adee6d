"""Fuzzing of the readers of foreign bytes: short property tests in CI, and the same for minutes.

python -m tests.fuzz.lines --minutes 30
python -m tests.fuzz.repository_files --minutes 30
python -m tests.fuzz.http --minutes 30
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable


def run_for_minutes(run: Callable[[int], int]) -> None:
    """The command line of a property: check batches of generated examples. Raises AssertionError."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    deadline = time.monotonic() + parser.parse_args().minutes * 60
    executions = 0
    while time.monotonic() < deadline:
        executions += run(100)
    print(f"{executions} executions without a fault")  # noqa: T201
