"""The report of an audit, for people and for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from decathlon_client.client_values import JsonObject

from decathlon_mcp.cli.output import print_table, printed, this_command
from decathlon_mcp.cli.usage import report

Policy: TypeAlias = Literal["idle", "random", "vandal", "forgers", "oracle", "steadiness", "leaks", "search"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
DEFAULT_POLICIES: tuple[Policy, ...] = POLICIES[:-1]
"""All but the search."""
BAR_WIDTH, LINE_WIDTH = 20, 100
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""
OF_THE_SERVER = "it attacks the server, whatever the task: it was carried out at"
INTERRUPTED = "the audit was interrupted"
PAYS_ALREADY = "an empty attempt solves the task, so that no attack can earn more"
"""Reasons why an attack was not carried out at a task."""
SOUND, SO_FAR, NOT_CHECKABLE = "sound", "sound so far", "not checkable here"
KINDS = (
    "pays for nothing",
    "can be forged",
    "no reward instead of 0",
    "cannot be solved",
    "unsteady",
    "leaks",
)
"""Kinds of findings; the first that a task has is its verdict."""
VERDICTS = (*KINDS, NOT_CHECKABLE, SO_FAR, SOUND)
"""In the order of the report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a task. `episode`: the public id of the attempt that shows it; empty if there is none."""

    kind: str
    what: str
    episode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one attempt without a call took. Processor time and memory are the whole machine's.

    `set_up_*`: until the tools were there. `grading_*`: with the removal of its sandboxes. `memory_mib`: of
    the open sandbox, with the task's servers that start at set-up. `call_*`: the mean of the calls of the
    attempt that reads, with the start of servers that start at the first call.
    """

    set_up_seconds: float
    set_up_cpu_seconds: float
    grading_seconds: float
    grading_cpu_seconds: float
    memory_mib: float
    call_seconds: float | None = None
    call_cpu_seconds: float | None = None

    def to_json(self) -> JsonObject:
        return {name: value and round(value, 3) for name, value in asdict(self).items()}


@dataclass(slots=True, kw_only=True)
class TaskReport:
    """The result of auditing one task, as far as it is known."""

    task: str
    findings: list[Finding] = field(default_factory=list[Finding])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """What could not be checked, with the reason."""
    notes: list[str] = field(default_factory=list[str])
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Of each policy; None for an attempt without a verdict."""
    cost: Cost | None = None
    unplayable: str = ""
    """Why the task could not be played at all."""

    @property
    def verdict(self) -> str:
        kinds = {finding.kind for finding in self.findings}
        found = next((kind for kind in KINDS if kind in kinds), None)
        if found or self.unplayable:
            return found or NOT_CHECKABLE
        return SO_FAR if INTERRUPTED in self.skipped.values() else SOUND

    def to_json(self, command: Callable[[Finding], str]) -> JsonObject:
        """`command`: makes the command that shows a finding."""
        return {
            "task": self.task,
            "verdict": self.verdict,
            "findings": [
                {"kind": one.kind, "what": one.what, "episode": one.episode, "command": command(one)}
                for one in self.findings
            ],
            "not_checked": self.skipped,
            "notes": self.notes,
            "rewards": self.rewards,
            "cost": None if self.cost is None else self.cost.to_json(),
            "unplayable": self.unplayable,
        }


@dataclass(slots=True)
class Report:
    """Shows an audit as it goes, and prints its tables."""

    again: str
    """Options by which other commands find the suite, each after a blank."""
    state: str
    """Options by which other commands find the state folder, each after a blank."""
    json_file: Path | None
    """Gets the whole report when the audit is over."""
    tasks: list[TaskReport] = field(default_factory=list[TaskReport])
    finished: int = 0
    """Number of finished tasks."""
    steps: int = 0
    """Parts of the audit that take similar time; more become known as it goes."""
    done: int = 0
    """Number of finished parts."""
    _run: str = ""
    _policies: Sequence[Policy] = ()
    _total: int = 0
    _stored: int = 0
    _played: int = 0
    _began_at: float = 0.0
    _shown_at: float = 0.0

    def begin(self, run: str, policies: Sequence[Policy], tasks: int, stored: int) -> None:
        """Say what is audited. `stored`: attempts that are there already."""
        self._policies, self._stored, self._began_at = policies, stored, time.monotonic()
        self._run, self._total, self.steps = run, tasks, 2 * tasks
        known = f"; {stored} attempts are known" if stored else ""
        report(f"audit of {tasks} task{'s' * (tasks != 1)}, run {printed(run)}{known}")

    def advance(self, what: str) -> None:
        """Show how far it is: on a terminal at once, in a pipe every ten seconds."""
        self._played += 1
        share = self.done / self.steps
        bar = f"{'#' * round(BAR_WIDTH * share):-<{BAR_WIDTH}}"
        text = f"{self.finished} of {self._total} tasks, {self._played} attempts; {printed(what)}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K[{bar}] {share:.0%}, {text}"[:LINE_WIDTH])
            sys.stderr.flush()
        elif time.monotonic() - self._shown_at > LINE_SECONDS:
            self._shown_at = time.monotonic()
            report(f"{share:.0%}, {text}")

    def finish(self) -> int:
        """Print the tables; 1 if a task has a finding, else 0. Raises OSError."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        ordered = sorted(self.tasks, key=lambda task: (VERDICTS.index(task.verdict), task.task))
        print_table(
            ("task", "verdict", "why"),
            [[task.task, task.verdict, self._why(task)] for task in ordered],
        )
        counts = Counter(task.verdict for task in ordered)
        totals = [f"{count} {verdict}" for verdict, count in counts.items()]
        sys.stdout.write(f"{', '.join(totals) or 'no task was played to its end'}\n")
        shown = [(task, finding) for task in ordered for finding in task.findings]
        for task, finding in shown:
            command = self._command(task.task, finding)
            sys.stdout.write(f"{printed(task.task)}: {printed(finding.what)}\n    {printed(command)}\n")
        if self.json_file is not None:
            document = {
                "run": self._run,
                "policies": [*self._policies],
                "seconds": round(time.monotonic() - self._began_at, 1),
                "attempts": self._played,
                "known_before": self._stored,
                "tasks": [task.to_json(partial(self._command, task.task)) for task in ordered],
            }
            # An evaluator's text and a folder's name may have lone surrogates, which UTF-8 does not have.
            text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
            self.json_file.write_text(text, "utf-8", "backslashreplace")
        return 1 if shown else 0

    def _why(self, task: TaskReport) -> str:
        if task.findings:
            return "; ".join(finding.what for finding in task.findings[:3])
        if task.unplayable:
            return task.unplayable
        forgers = {name: why for name, why in task.skipped.items() if name.startswith("forger ")}
        interrupted = sum(why == INTERRUPTED for why in forgers.values())
        unfit = sum(not why.startswith((INTERRUPTED, OF_THE_SERVER)) for why in forgers.values())
        rest = [f"{name} ({why})" for name, why in task.skipped.items() if name not in forgers]
        played = f"{len(task.rewards)} attempts"
        missing = [f"{unfit} attacks do not fit its tools"] if unfit else []
        missing += [f"attacks not carried out: {interrupted} ({INTERRUPTED})"] if interrupted else []
        unchecked = [f"not checked: {', '.join(rest)}"] if rest else []
        return "; ".join([played, *missing, *unchecked])

    def _command(self, task: str, finding: Finding) -> str:
        """The command that shows a finding."""
        match finding.kind:
            case "unsteady":
                words = f"audit {task} --policies oracle --policies steadiness"
            case "leaks":
                words = f"audit {task} --policies random --policies leaks"
            case _:
                words = f"replay {finding.episode} --claim"
        return f"{this_command()} {words}{self.again}{self.state}"
