"""Grading one closed attempt: a verdict on every path.

What is read is the evaluator's exit status and, where a rubric names a function, what that returned over a
descriptor of ours; nothing that was printed. No score is not a zero: whatever else happens is a status.

Decided 2026-11-21: evaluator and rubric function each get a sandbox of their own. Some evaluators run the
agent's programs, and what those leave behind must not meet the run that the weights are for.
"""

from __future__ import annotations

import logging
import signal
import tempfile
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from decathlon_mcp.driver_client.driver import RunResult
from decathlon_mcp.errors import CallTimeoutError, DecathlonError, DriverError, SandboxLostError, SuiteError
from decathlon_mcp.grading.grader import Grader, pack
from decathlon_mcp.grading.job import GradingJob
from decathlon_mcp.grading.metrics import BadMetricsError, read_metrics
from decathlon_mcp.grading.rubric import Rubric, load_rubric
from decathlon_mcp.grading.verdict import OUTPUT_CHARACTERS, Status, Verdict, verdict_of
from decathlon_mcp.telemetry.logs import fields

GRACE_SECONDS = 15.0
"""How much longer than a run's own deadline the grading may take, to hear its last words."""
SIGNALLED = frozenset({126, 127, *(128 + number for number in signal.valid_signals())})
"""Exit codes with which a runner (`uv run`, a shell) says that the evaluator was killed or did not start."""

log = logging.getLogger("decathlon.rewards")


async def grade(job: GradingJob) -> Verdict:
    """The verdict on an attempt. Raises nothing but its own cancellation."""
    attempt, suite, task, captured = job.attempt, job.suite, job.task, job.captured
    started = anyio.current_time()
    known: dict[str, Any] = {"in_place": job.in_place, "refused": captured.refused}
    """What the verdict says however this ends."""

    async def outcome(scratch: Path) -> dict[str, Any]:
        """The fields of a scored verdict."""
        rubric = await anyio.to_thread.run_sync(load_rubric, suite, task)
        if not (suite.path / task.folder / f"{task.files.evaluation.replace('.', '/')}.py").is_file():
            raise _NoScoreError("evaluator_error", f"{task.id} has no evaluator")
        baggage = await anyio.to_thread.run_sync(
            lambda: pack(
                suite,
                task,
                common=job.common,
                sealed=captured.sealed,
                workspace=None if job.in_place else captured.workspace,
                scratch=scratch,
                credentials=job.credentials,
            )
        )
        known["refused"] += baggage.refused
        known["evaluator_digest"] = baggage.evaluator_digest
        grader = Grader(
            attempt=attempt,
            suite=suite,
            task=task,
            open_sandbox=job.open_sandbox,
            baggage=baggage,
            in_place=job.in_place,
            deadline=started + job.deadline_seconds,
        )
        return await _score(grader, rubric)

    found = _no_score("timeout", f"the grading took longer than {job.deadline_seconds:g} s")
    try:
        with anyio.move_on_after(job.deadline_seconds + GRACE_SECONDS):
            with tempfile.TemporaryDirectory(
                prefix="grading-", dir=captured.workspace and captured.workspace.parent
            ) as scratch:
                found = await outcome(Path(scratch))
    except Exception as error:
        found = _no_score(*_cause(error))
        if not isinstance(error, _NoScoreError | DecathlonError):
            log.exception("grading failed", extra=fields(task=attempt.task))
    seconds = round(anyio.current_time() - started, 3)
    return verdict_of(attempt, seconds=seconds, **known, **found)


async def _score(grader: Grader, rubric: Rubric | None) -> dict[str, Any]:
    result = await grader.evaluate()
    output = _output(result)
    success, detail = _succeeded(result, output), ""
    if success and grader.suite.profile.claim_required and not grader.attempt.claimed:
        success, detail = False, "this suite counts only what the agent itself claimed to be done"
    metrics = {**grader.attempt.counts, "success": float(success)}
    reward, weights = float(success), dict[str, float]()
    if rubric is not None:
        try:
            if rubric.function is not None:
                metrics |= await _dense_metrics(grader, rubric.function)
            reward, weights = rubric.reward(metrics), dict(rubric.weights)
            metrics |= rubric.comparisons(metrics)
        except BadMetricsError as error:
            raise _NoScoreError("evaluator_error", error.message, output) from None
    return {
        "status": "scored",
        "success": success,
        "reward": reward,
        "metrics": metrics,
        "weights": weights,
        "evaluator_output": output,
        "detail": detail,
    }


async def _dense_metrics(grader: Grader, address: str) -> dict[str, float]:
    result = await grader.call(address)
    if result.timed_out:
        raise _NoScoreError("timeout", f"{address} did not return in time", _output(result))
    if result.exit_code != 0:
        raise _NoScoreError("evaluator_error", f"{address} failed", _output(result))
    return read_metrics(result.channel)


def _succeeded(result: RunResult, output: str) -> bool:
    """Exit code 0. Raises _NoScoreError for an evaluator that did not get to say so."""
    if result.timed_out:
        raise _NoScoreError("timeout", "the evaluator did not end in time", output)
    if result.exit_code is None or result.exit_code in SIGNALLED:
        how = f"signal {result.signal}" if result.exit_code is None else f"exit code {result.exit_code}"
        raise _NoScoreError("evaluator_error", f"the evaluator was killed or did not start: {how}", output)
    return result.exit_code == 0


def _output(result: RunResult) -> str:
    """The last of what was printed, for people; the driver's word on its length is not taken."""
    half = OUTPUT_CHARACTERS // 2
    printed = (result.stdout[-half:].strip(), result.stderr[-half:].strip())
    return "\n".join(part for part in printed if part)


class _NoScoreError(Exception):
    """The evaluation is over and gave no score."""

    def __init__(self, status: Status, detail: str, output: str = "") -> None:
        super().__init__(detail)
        self.status: Status = status
        self.detail = detail
        self.output = output


def _no_score(status: Status, detail: str, output: str = "") -> dict[str, Any]:
    return {"status": status, "detail": detail, "evaluator_output": output}


def _cause(error: Exception) -> tuple[Status, str, str]:
    match error:
        case _NoScoreError():
            return error.status, error.detail, error.output
        case SandboxLostError():
            return "sandbox_lost", error.message, ""
        case CallTimeoutError():
            return "timeout", error.message, ""
        case SuiteError():
            return "evaluator_error", error.message, ""
        case DriverError() if error.data.get("reason") == "spawn":
            return "evaluator_error", f"the evaluator could not be started: {error.message}", ""
        case DecathlonError():
            return "not_evaluated", error.message, ""
        case _:
            return "not_evaluated", f"a fault of the server: {type(error).__name__}", ""
