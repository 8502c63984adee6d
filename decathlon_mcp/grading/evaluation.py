"""Grades one closed attempt: `grade` returns a verdict on every path.

The score comes from the evaluator's exit code and, if there is a function that returns metrics, from what it
returns, which is sent over a file descriptor of its own. Nothing printed is parsed. If there is no score, the
verdict's status says why: `forfeited`, with a reward of 0, if the agent may have caused it.

Decided 2026-11-21: the evaluator and the rubric's function each run in a sandbox of their own. Some
evaluators run programs of the agent, which could leave something behind for the run that the weights apply
to.

Decided 2026-11-22: an attempt whose evaluator hangs or is killed is forfeited. Without a reward, a policy in
training would learn to break its evaluator whenever it expects to fail, and its failures would vanish from
the group's mean.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.driver.client import RunResult
from decathlon_mcp.errors import DecathlonError, DiskFullError, DriverError, SandboxLostError, SuiteError
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.grading.fault import AgentsFaultError
from decathlon_mcp.grading.grader import ForfeitedError, Grader, printed
from decathlon_mcp.grading.inputs import GradingInputs, GradingJob, prepare_inputs
from decathlon_mcp.grading.rubric import BadMetricsError, Rubric, load_rubric, read_metrics
from decathlon_mcp.grading.verdict import Outcome, Verdict, build_verdict
from decathlon_mcp.storage.disk import is_full
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.rewards")


async def grade(job: GradingJob) -> Verdict:
    """Grade an attempt. Raises DiskFullError, after which it can be tried again, and nothing else."""
    started = anyio.current_time()
    inputs: GradingInputs | None = None
    captured = job.captured.workspace
    try:
        with tempfile.TemporaryDirectory(prefix="grading-", dir=captured and captured.parent) as scratch:
            rubric = await anyio.to_thread.run_sync(load_rubric, job.suite, job.task)
            _refuse(job)
            inputs = await anyio.to_thread.run_sync(prepare_inputs, job, Path(scratch))
            outcome = await evaluate(Grader(job, inputs), rubric)
    except Exception as error:
        if is_full(error):
            raise DiskFullError("the server's disk is full: there is no room to grade the attempt") from error
        outcome = outcome_of_error(error)
        if not isinstance(error, ForfeitedError | DecathlonError):
            log.exception("grading failed", extra=fields(task=job.attempt.task))
    return build_verdict(
        job.attempt,
        outcome,
        evaluator_digest=inputs.evaluator_digest if inputs else None,
        refused=(*job.captured.refused, *(inputs.refused if inputs else ())),
        in_place=job.in_place,
        seconds=round(anyio.current_time() - started, 3),
    )


UNGRADED: Mapping[TruncationCause, str] = {
    "calls": "the limit of tool calls ended this attempt",
    "client": "the client ended this attempt, which its agent had not finished",
}
"""The causes for which an attempt is not graded if the suite's truncated attempts are not. A log that reached
its limit may be due to a full disk, which is not the agent's fault."""


def is_graded(suite: Suite, cause: TruncationCause | None) -> bool:
    """Whether a suite's attempt that was cut short by this is graded; if not, it is forfeited."""
    return suite.profile.grades_truncated or cause not in UNGRADED


def _refuse(job: GradingJob) -> None:
    """Raise ForfeitedError for an attempt that a limit ended, if these are not graded, and SuiteError."""
    # Python exits with 1 for a module that does not exist, which would be a failed attempt.
    module = f"{job.task.files.evaluation.replace('.', '/')}.py"
    if not (job.suite.path / job.task.folder / module).is_file():
        raise SuiteError(f"{job.task.id} has no evaluator")
    cause = job.attempt.truncated_by
    if cause is not None and not is_graded(job.suite, cause):
        raise ForfeitedError(
            f"{UNGRADED[cause]}: attempts that a limit ended are not graded here; "
            "`grades_truncated: true` in suite.yaml grades them"
        )


async def evaluate(grader: Grader, rubric: Rubric | None) -> Outcome:
    """Run the evaluator and the rubric's function. Raises ForfeitedError if they give no score.

    They give none if the function says that the attempt succeeded and the evaluator that it failed, or the
    other way round.
    """
    attempt = grader.job.attempt
    success, output, detail, uncaught = False, "", "", ""
    if rubric is None or not rubric.decides:
        result = await grader.run_evaluator()
        success, output, uncaught = result.exit_code == 0, printed(result), uncaught_in(result)
    try:
        returned = dict[str, float]()
        # An evaluator that crashed has not checked the attempt: a rubric would pay for what it did not see.
        if rubric is not None and rubric.function is not None and not uncaught:
            result = await grader.run_rubric_function(rubric.function)
            if uncaught := uncaught_in(result):
                uncaught = f"{rubric.function}: {uncaught}"
            if uncaught or rubric.decides:
                output = printed(result)
            if not uncaught:
                returned = read_metrics(result.channel)
                success = _success(rubric, returned, success)
        if success and grader.job.suite.profile.claim_required and not attempt.claimed:
            success = False
            detail = "this suite counts only attempts that the agent itself claimed to be done"
        metrics = {**attempt.counts, **returned, "success": float(success)}
        reward, weights = float(success), dict[str, float]()
        if rubric is not None and not uncaught:
            counts = await anyio.to_thread.run_sync(attempt.tool_counts) if rubric.counts_tools else {}
            metrics |= rubric.tool_metrics(counts)
            reward, weights = rubric.reward(metrics), dict(rubric.weights)
            metrics |= rubric.comparisons(metrics)
    except BadMetricsError as error:
        raise ForfeitedError(error.message, output) from None
    return Outcome(
        status="scored",
        success=success,
        reward=0.0 if uncaught else reward,
        metrics=metrics,
        weights=weights,
        output=output,
        uncaught=uncaught,
        detail=detail,
    )


def _success(rubric: Rubric, returned: Mapping[str, float], exit_code_is_0: bool) -> bool:
    """Whether the attempt succeeded, by what the function returned and by the evaluator's exit code."""
    own = returned.get("success")
    if rubric.decides:
        return own >= 1 if own is not None else bool(returned) and min(returned.values()) >= 1
    if own is not None and (own >= 1) is not exit_code_is_0:
        # No error of the suite: an evaluator may run programs of the agent, which can answer each of the two
        # runs differently.
        raise ForfeitedError(
            f"{rubric.function} returns success {own:g}, and the evaluator's exit code says "
            f"{'success' if exit_code_is_0 else 'failure'}: leave one of them out"
        )
    return exit_code_is_0


def uncaught_in(result: RunResult) -> str:
    """The exception that ended a program of the grader, as its payload reported it; empty if there is none.

    It can only lower the reward: a program of the agent that the evaluator runs may be able to write it.
    """
    if result.exit_code == 0:
        return ""
    try:
        report = json.loads(result.channel or '""')
    except (ValueError, RecursionError):
        report = None
    return report if isinstance(report, str) else "(unreadable)"


def outcome_of_error(error: Exception) -> Outcome:
    """The outcome of an evaluation that raised this error."""
    match error:
        case ForfeitedError():
            return Outcome(status="forfeited", detail=error.detail, output=error.output)
        case AgentsFaultError():
            return Outcome(status="forfeited", detail=error.message)
        case SandboxLostError():
            return Outcome(status="sandbox_lost", detail=error.message)
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
