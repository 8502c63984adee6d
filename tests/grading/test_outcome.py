"""Outcomes: how results and errors of the programs that grade become a status."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from decathlon_mcp.driver_client.driver import RunResult
from decathlon_mcp.errors import (
    CallTimeoutError,
    DriverError,
    ImageError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    SuiteError,
)
from decathlon_mcp.grading.evaluation import NoScoreError, outcome_of_error, printed, succeeded
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


@pytest.mark.parametrize(("exit_code", "success"), [(0, True), (1, False), (2, False), (255, False)])
def test_exit_code_decides_success(exit_code: int, success: bool) -> None:
    assert succeeded(result(exit_code=exit_code)) is success


@pytest.mark.parametrize(
    ("fields", "status", "detail"),
    [
        ({"timed_out": True, "exit_code": None, "signal": 9}, "timeout", "the evaluator did not end in time"),
        ({"timed_out": True, "exit_code": 0}, "timeout", "the evaluator did not end in time"),
        ({"exit_code": None, "signal": 9}, "evaluator_error", "was killed or did not start: signal 9"),
        ({"exit_code": 126}, "evaluator_error", "was killed or did not start: exit code 126"),
        ({"exit_code": 127}, "evaluator_error", "was killed or did not start: exit code 127"),
        ({"exit_code": 128 + signal.SIGKILL}, "evaluator_error", "exit code 137"),
        ({"exit_code": 128 + signal.SIGTERM}, "evaluator_error", "exit code 143"),
    ],
)
def test_evaluator_that_does_not_exit_by_itself_gives_no_score(
    fields: dict[str, Any], status: str, detail: str
) -> None:
    with pytest.raises(NoScoreError) as caught:
        succeeded(result(**fields))
    assert (caught.value.status, caught.value.output) == (status, "out\nerr")
    assert detail in caught.value.detail


@pytest.mark.parametrize(
    ("stdout", "stderr", "output"),
    [
        ("out\n", "err\n", "out\nerr"),
        ("", " err ", "err"),
        ("out", "", "out"),
        (" ", "\n", ""),
        ("a" + "b" * 4096, "c" + "d" * 4096, "b" * 4096 + "\n" + "d" * 4096),
    ],
)
def test_printed_is_the_end_of_stdout_and_stderr(stdout: str, stderr: str, output: str) -> None:
    assert printed(result(stdout=stdout, stderr=stderr)) == output


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NoScoreError("timeout", "late", "out"), Outcome(status="timeout", detail="late", output="out")),
        (SandboxLostError("out of memory"), Outcome(status="sandbox_lost", detail="out of memory")),
        (CallTimeoutError("no answer"), Outcome(status="timeout", detail="no answer")),
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
