"""Verdicts next to what upstream's command says, in `benchmarks/results/fidelity.json`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from decathlon_mcp.catalogue.requirements import HostInfo, missing_requirements
from decathlon_mcp.plugins.readiness.list_tasks import way_to_run
from decathlon_mcp.suites.suite import Suite
from tools.fidelity.files import TASKS

FILE = Path(__file__).parents[2] / "benchmarks/results/fidelity.json"
REVISION_CHARACTERS = 8


_NO_SERVER = "the MCP server `{}` is in no package registry"
_ASKS_THE_WEB = "its evaluator asks the web, and upstream's command has none here"
_NO_MAPS = "Google's maps are not imitated"
_NO_TRUTH = "no ground truth to make a correct attempt from"
NOT_PLAYED: Mapping[str, str] = {
    "academic-pdf-report": _ASKS_THE_WEB,
    "cvpr-research": _NO_TRUTH,
    "find-alita-paper": _ASKS_THE_WEB,
    "invoice-org": _NO_SERVER.format("yahoo-finance"),
    "ipad-edu-price": _NO_SERVER.format("yahoo-finance"),
    "language-school": _NO_TRUTH,
    "latex-prompt-box": _NO_SERVER.format("arxiv-latex"),
    "mrbeast-analysis": _NO_SERVER.format("youtube"),
    "nvidia-market": _NO_SERVER.format("yahoo-finance"),
    "nvidia-stock-analysis": _NO_SERVER.format("yahoo-finance"),
    "profile-update-online": _ASKS_THE_WEB,
    "search-ca-school": _ASKS_THE_WEB,
    "shopping-helper": _ASKS_THE_WEB,
    "stock-build-position": _NO_SERVER.format("yahoo-finance"),
    "subway-planning": _NO_MAPS,
    "train-ticket-plan": _NO_SERVER.format("rail_12306"),
    "travel-exchange": _NO_SERVER.format("yahoo-finance"),
    "trip-adviser": _NO_MAPS,
    "trip-itinerary-generator": _NO_MAPS,
    "upenn-campus-route": _NO_MAPS,
    "yahoo-analysis": _NO_SERVER.format("yahoo-finance"),
}
"""Tasks that could run with a recording, with the reason why none was made."""


class Attempt(BaseModel):
    """The reward and status here, and the exit code of upstream's command."""

    model_config = ConfigDict(frozen=True)

    reward: float | None
    status: str
    exit_code: int

    @property
    def agrees(self) -> bool:
        return self.status == "scored" and self.reward == (1.0 if self.exit_code == 0 else 0.0)

    def __str__(self) -> str:
        reward = self.status if self.reward is None else f"{self.reward:g}"
        return f"{reward}, exit {self.exit_code}{'' if self.agrees else ' (differs)'}"


@dataclass(frozen=True, slots=True)
class Result:
    """An attempt of a kind at a task. `compared_only`: it is not known to be correct or wrong."""

    task: str
    kind: str
    attempt: Attempt
    compared_only: bool = False

    @property
    def as_expected(self) -> bool:
        """Do both agree, and is only the correct attempt rewarded?"""
        rewarded_rightly = (self.attempt.reward == 1.0) == (self.kind == "right")
        return self.attempt.agrees and (self.compared_only or rewarded_rightly)

    def __str__(self) -> str:
        return f"{self.task:28} {self.kind:8} {self.attempt}{'' if self.as_expected else '  UNEXPECTED'}"


class PlayedTask(BaseModel):
    """Attempts at a task. `way`: how it can run. `lacks_files`: the checkout lacks some of its files."""

    way: str
    lacks_files: bool
    revision: str
    date: str
    attempts: dict[str, Attempt]


Results = dict[str, dict[str, PlayedTask]]
"""By release and task."""
_RESULTS = TypeAdapter(Results)


def read() -> Results:
    return _RESULTS.validate_json(FILE.read_bytes()) if FILE.exists() else {}


def store(suite: Suite, results: Sequence[Result]) -> None:
    """Replace what the file has of these attempts at the suite's release. Blocks: runs git."""
    lacking = _tasks_with_missing_files(suite.path)
    revision, today = suite.revision[:REVISION_CHARACTERS], date.today().isoformat()
    new = [
        PlayedTask(
            way=_way(suite, result.task),
            lacks_files=result.task in lacking,
            revision=revision,
            date=today,
            attempts={result.kind: result.attempt},
        )
        for result in results
    ]
    # Read as late as possible: several programs may be writing.
    played = read()
    release = played.setdefault(release_of(suite), {})
    for result, task in zip(results, new, strict=True):
        before = release.get(result.task)
        attempts = {**(before.attempts if before else {}), **task.attempts}
        release[result.task] = task.model_copy(update={"attempts": attempts})
    ordered: Mapping[str, Mapping[str, PlayedTask]] = {
        name: dict(sorted(played[name].items())) for name in sorted(played, reverse=True)
    }
    FILE.write_bytes(_RESULTS.dump_json(ordered, indent=1) + b"\n")  # type: ignore[arg-type]


def release_of(suite: Suite) -> str:
    """The release of Toolathlon, or `gym`."""
    if suite.profile.name == "gym":
        return "gym"
    return "unknown" if suite.release is None else suite.release.name


def _way(suite: Suite, name: str) -> str:
    task = suite.tasks[name]
    # Without keys that only recording takes, which are not the task's own.
    text = way_to_run(suite, task, missing_requirements(suite, task, HostInfo())).text
    return text.partition(" (")[0]


def _tasks_with_missing_files(checkout: Path) -> set[str]:
    """Tasks of a clone without all of its large files."""
    command = ("git", "-C", checkout, "ls-files", "--deleted", "--", TASKS)
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {Path(line.strip('"')).parts[len(TASKS.parts)] for line in listed.splitlines()}
