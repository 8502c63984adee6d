"""Outcomes: how results and errors of the programs that grade become a status."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from decathlon_mcp.driver.client import RunResult
from decathlon_mcp.errors import (
    DriverError,
    ImageError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    SuiteError,
)
from decathlon_mcp.grading.evaluation import outcome_of_error
from decathlon_mcp.grading.grader import ForfeitedError, no_exit
from decathlon_mcp.grading.verdict import Outcome


def result(**fields: Any) -> RunResult:
    values: dict[str, Any] = {
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "stdout": "out",
        "stderr": "err",
    }
    return RunResult(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(({"exit_code": code}, "") for code in (0, 1, 2, 125, 255)),
        ({"timed_out": True, "exit_code": None, "signal": 9}, "did not end in time"),
        ({"timed_out": True, "exit_code": 0}, "did not end in time"),
        ({"exit_code": None, "signal": 9}, "was killed: signal 9"),
        ({"exit_code": None, "signal": None}, "was killed: signal None"),
        ({"exit_code": 126}, "was killed or did not start: exit code 126"),
        ({"exit_code": 127}, "was killed or did not start: exit code 127"),
        ({"exit_code": 128 + signal.SIGKILL}, "was killed or did not start: exit code 137"),
        ({"exit_code": 128 + signal.SIGTERM}, "was killed or did not start: exit code 143"),
    ],
)
def test_only_an_exit_code_of_its_own_is_an_exit(fields: dict[str, Any], reason: str) -> None:
    assert no_exit(result(**fields)) == reason


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (
            ForfeitedError("late", "out"),
            Outcome(status="forfeited", detail="late", output="out"),
        ),
        (SandboxLostError("engine gone"), Outcome(status="sandbox_lost", detail="engine gone")),
        (SuiteError("rubric.yaml: no"), Outcome(status="evaluator_error", detail="rubric.yaml: no")),
        (
            DriverError("no such program", reason="spawn"),
            Outcome(status="evaluator_error", detail="the evaluator could not be started: no such program"),
        ),
        (DriverError("disk full", reason="files"), Outcome(status="not_evaluated", detail="disk full")),
        (ProviderUnavailableError("no engine"), Outcome(status="not_evaluated", detail="no engine")),
        (ImageError("no image"), Outcome(status="not_evaluated", detail="no image")),
        (LimitExceededError("too large"), Outcome(status="not_evaluated", detail="too large")),
        (
            ValueError("/a/secret/path"),
            Outcome(status="not_evaluated", detail="a fault of the server: ValueError"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_determines_the_outcome(error: Exception, outcome: Outcome) -> None:
    assert outcome_of_error(error) == outcome
