"""Outcomes: how results and errors of the programs that grade become a status."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.driver.client import RunResult
from decathlon_mcp.errors import (
    DriverError,
    ProviderUnavailableError,
    SandboxLostError,
    SuiteError,
)
from decathlon_mcp.grading.evaluation import outcome_of_error
from decathlon_mcp.grading.grader import ForfeitedError
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
        (
            ValueError("/a/secret/path"),
            Outcome(status="not_evaluated", detail="a fault of the server: ValueError"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_determines_the_outcome(error: Exception, outcome: Outcome) -> None:
    assert outcome_of_error(error) == outcome
