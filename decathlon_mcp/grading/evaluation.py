"""Grades one closed attempt: `grade` returns a verdict on every path.

The score comes from the evaluator's exit code and, if a rubric names a function, from that function's return
value, which is sent over a file descriptor of its own. Nothing printed is parsed. If there is no score, the
verdict's status says why.

Decided 2026-11-21: the evaluator and the rubric's function each run in a sandbox of their own. Some
evaluators run programs of the agent, which could leave something behind for the run that the weights apply
to.
"""

from __future__ import annotations

import logging
import signal
import tempfile
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.driver_client.driver import RunResult
from decathlon_mcp.errors import CallTimeoutError, DecathlonError, DriverError, SandboxLostError, SuiteError
from decathlon_mcp.grading.grader import Grader
from decathlon_mcp.grading.inputs import GradingInputs, prepare_inputs
from decathlon_mcp.grading.job import GradingJob
from decathlon_mcp.grading.metrics import BadMetricsError, read_metrics
from decathlon_mcp.grading.rubric import Rubric, load_rubric
from decathlon_mcp.grading.verdict import OUTPUT_CHARACTERS, Outcome, Status, Verdict, build_verdict
from decathlon_mcp.telemetry.logs import fields

GRACE_SECONDS = 15.0
"""Time beyond the job's deadline in which a run that has timed out still delivers its output."""
SIGNALLED = frozenset({126, 127, *(128 + number for number in signal.valid_signals())})
"""Exit codes of a runner (a shell, `uv run`) whose program was killed by a signal or did not start."""

log = logging.getLogger("decathlon.rewards")


class NoScoreError(Exception):
    """The evaluation gives no score; `status` says why, `detail` explains it, `output` was printed."""

    def __init__(self, status: Status, detail: str, output: str = "") -> None:
        super().__init__(detail)
        self.status: Status = status
        self.detail = detail
        self.output = output


async def grade(job: GradingJob) -> Verdict:
    """Grade an attempt. Raises nothing except on cancellation."""
    started = anyio.current_time()
    inputs: GradingInputs | None = None
    outcome = Outcome(status="timeout", detail=f"the grading took longer than {job.deadline_seconds:g} s")
    captured = job.captured.workspace
    try:
        with anyio.move_on_after(job.deadline_seconds + GRACE_SECONDS):
            with tempfile.TemporaryDirectory(prefix="grading-", dir=captured and captured.parent) as scratch:
                rubric = await anyio.to_thread.run_sync(load_rubric, job.suite, job.task)
                _check_evaluator(job)
                inputs = await anyio.to_thread.run_sync(prepare_inputs, job, Path(scratch))
                grader = Grader(job, inputs, deadline=started + job.deadline_seconds)
                outcome = await evaluate(grader, rubric)
    except Exception as error:
        outcome = outcome_of_error(error)
        if not isinstance(error, NoScoreError | DecathlonError):
            log.exception("grading failed", extra=fields(task=job.attempt.task))
    return build_verdict(
        job.attempt,
        outcome,
        evaluator_digest=inputs.evaluator_digest if inputs else None,
        refused=(*job.captured.refused, *(inputs.refused if inputs else ())),
        in_place=job.in_place,
        seconds=round(anyio.current_time() - started, 3),
    )


async def evaluate(grader: Grader, rubric: Rubric | None) -> Outcome:
    """Run the evaluator and the rubric's function. Raises NoScoreError if there is no score."""
    attempt, profile = grader.job.attempt, grader.job.suite.profile
    result = await grader.run_evaluator()
    success, output, detail = succeeded(result), printed(result), ""
    if success and profile.claim_required and not attempt.claimed:
        success, detail = False, "this suite counts only attempts that the agent itself claimed to be done"
    metrics = {**attempt.counts, "success": float(success)}
    reward, weights = float(success), dict[str, float]()
    if rubric is not None:
        try:
            if rubric.function is not None:
                metrics |= await _rubric_metrics(grader, rubric.function)
            reward, weights = rubric.reward(metrics), dict(rubric.weights)
            metrics |= rubric.comparisons(metrics)
        except BadMetricsError as error:
            raise NoScoreError("evaluator_error", error.message, output) from None
    return Outcome(
        status="scored",
        success=success,
        reward=reward,
        metrics=metrics,
        weights=weights,
        output=output,
        detail=detail,
    )


def succeeded(result: RunResult) -> bool:
    """True for exit code 0. Raises NoScoreError if the evaluator did not start or did not exit by itself."""
    if result.timed_out:
        raise NoScoreError("timeout", "the evaluator did not end in time", printed(result))
    if result.exit_code is None or result.exit_code in SIGNALLED:
        reason = f"signal {result.signal}" if result.exit_code is None else f"exit code {result.exit_code}"
        raise NoScoreError(
            "evaluator_error", f"the evaluator was killed or did not start: {reason}", printed(result)
        )
    return result.exit_code == 0


def printed(result: RunResult) -> str:
    """The end of what a program printed, for people."""
    # The driver was asked for no more, but it runs in a sandbox and may send more.
    half = OUTPUT_CHARACTERS // 2
    parts = (result.stdout[-half:].strip(), result.stderr[-half:].strip())
    return "\n".join(part for part in parts if part)


def outcome_of_error(error: Exception) -> Outcome:
    """The outcome of an evaluation that raised this error."""
    match error:
        case NoScoreError():
            return Outcome(status=error.status, detail=error.detail, output=error.output)
        case SandboxLostError():
            return Outcome(status="sandbox_lost", detail=error.message)
        case CallTimeoutError():
            return Outcome(status="timeout", detail=error.message)
        case SuiteError():
            return Outcome(status="evaluator_error", detail=error.message)
        case DriverError() if error.data.get("reason") == "spawn":
            detail = f"the evaluator could not be started: {error.message}"
            return Outcome(status="evaluator_error", detail=detail)
        case DecathlonError():
            return Outcome(status="not_evaluated", detail=error.message)
        case _:
            # No message: it may contain paths or secrets of the server, and the agent sees the verdict.
            detail = f"a fault of the server: {type(error).__name__}"
            return Outcome(status="not_evaluated", detail=detail)


def _check_evaluator(job: GradingJob) -> None:
    # Python exits with 1 for a module that does not exist, which would be a failed attempt.
    module = f"{job.task.files.evaluation.replace('.', '/')}.py"
    if not (job.suite.path / job.task.folder / module).is_file():
        raise NoScoreError("evaluator_error", f"{job.task.id} has no evaluator")


async def _rubric_metrics(grader: Grader, address: str) -> dict[str, float]:
    result = await grader.run_rubric_function(address)
    if result.timed_out:
        raise NoScoreError("timeout", f"{address} did not return in time", printed(result))
    if result.exit_code != 0:
        raise NoScoreError("evaluator_error", f"{address} failed", printed(result))
    return read_metrics(result.channel)
