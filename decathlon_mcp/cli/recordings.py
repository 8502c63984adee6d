"""`recordings`: list, show, prune and compare what `--web record` has stored. No server has to run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from decathlon_mcp.errors import BadRequestError, SettingsError
from decathlon_mcp.settings import default_state
from decathlon_mcp.web.recording import (
    FOLDER,
    RUNNABLE_RATE,
    Recording,
    RecordingError,
    Summary,
    delete,
    find_recordings,
)

recordings = App(name="recordings", help="List, show, prune and compare recordings of the web.", sort_key=7)

Task = Annotated[str, Parameter(metavar="TASK")]
Revision = Annotated[str | None, Parameter(metavar="TEXT", show_default=False)]
State = Annotated[Path | None, Parameter(metavar="DIR")]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


@recordings.command(name="list")
def list_recordings(*, json: Flag = False, state: State = None) -> int:
    """List the recordings, with the part of other rollouts' requests that they answered.

    Parameters
    ----------
    json
        Print `{"recordings": [...]}`.
    state
        The servers' state folder. [the default one]
    """
    folder = (state or default_state()) / FOLDER
    summaries = [_summary(path) for path in find_recordings(folder)]
    if json:
        _print_json({"recordings": [_summary_json(summary) for summary in summaries]})
        return 0
    for summary in summaries:
        sys.stdout.write("\t".join(_cells(summary)) + "\n")
    if not summaries:
        sys.stderr.write(f"decathlon-mcp: there are no recordings in {folder}\n")
    return 0


@recordings.command
def show(task: Task, /, *, revision: Revision = None, json: Flag = False, state: State = None) -> int:
    """Print the exchanges of a task's recording, and the rollouts that used it.

    Parameters
    ----------
    task
        A task, or `suite:task`.
    revision
        Beginning of the suite's revision, if there are recordings of several.
    json
        Print one JSON object.
    state
        The servers' state folder. [the default one]
    """
    with _open(state, task, revision) as recording:
        summary, exchanges = recording.summary(), recording.exchanges()
        rollouts = recording.rollouts()
    if json:
        value: dict[str, Any] = _summary_json(summary)
        value["exchanges"] = [
            {
                "part": exchange.part,
                "number": exchange.number,
                "method": exchange.method,
                "url": exchange.url,
                "status": exchange.status,
                "bytes": exchange.size,
                "recorded_at": exchange.recorded_at,
            }
            for exchange in exchanges
        ]
        value["rollouts"] = [
            {"episode": rollout.episode, "mode": rollout.mode, "at": rollout.at, **rollout.counts.to_json()}
            for rollout in rollouts
        ]
        _print_json(value)
        return 0
    sys.stdout.write("\t".join(_cells(summary)) + "\n\n")
    for exchange in exchanges:
        line = (exchange.part, exchange.method, str(exchange.status), str(exchange.size), exchange.url)
        sys.stdout.write("\t".join(line) + "\n")
    sys.stdout.write("\n")
    for rollout in rollouts:
        counts = ", ".join(f"{number} {name}" for name, number in rollout.counts.to_json().items() if number)
        sys.stdout.write(f"{rollout.at[:19]}\t{rollout.mode}\t{rollout.episode}\t{counts}\n")
    return 0


@recordings.command
def prune(
    task: Task,
    /,
    *,
    url: Annotated[str | None, Parameter(metavar="PATTERN", show_default=False)] = None,
    part: Annotated[str | None, Parameter(metavar="PART", show_default=False)] = None,
    revision: Revision = None,
    state: State = None,
) -> int:
    """Delete a task's recording, or the exchanges whose address matches a pattern.

    Parameters
    ----------
    task
        A task, or `suite:task`.
    url
        Delete only exchanges of these addresses (`*`, `?`, `[...]`), such as `https://arxiv.org/*`.
    part
        Delete only exchanges of this part: `preprocess`, `agent` or `grader`.
    revision
        Beginning of the suite's revision, if there are recordings of several.
    state
        The servers' state folder. [the default one]
    """
    if part not in (None, "preprocess", "agent", "grader"):
        raise BadRequestError(f"--part: preprocess, agent or grader was expected, not {part!r}")
    if url is None and part is None:
        path = _find(state, task, revision)
        delete(path)
        sys.stdout.write(f"deleted {path}\n")
        return 0
    with _open(state, task, revision) as recording:
        removed = recording.remove(part=part, url_glob=url or "*")
    sys.stdout.write(f"deleted {removed} exchanges\n")
    return 0


@recordings.command
def compare(task: Task, /, *, revision: Revision = None, json: Flag = False, state: State = None) -> int:
    """Ask the sites of a recording again and print what has changed. Exit status 0 only if nothing has.

    Parameters
    ----------
    task
        A task, or `suite:task`.
    revision
        Beginning of the suite's revision, if there are recordings of several.
    json
        Print one JSON object a line.
    state
        The servers' state folder. [the default one]
    """
    from decathlon_mcp.web.comparison import compare as compare_with_web

    with _open(state, task, revision) as recording:
        exchanges = recording.exchanges()
    counts = Counter[str]()
    for result in compare_with_web(exchanges):
        counts[result.difference] += 1
        if json:
            difference, detail = result.difference, result.detail
            _print_json({"url": result.exchange.url, "difference": difference, "detail": detail})
        elif result.difference != "same":
            sys.stdout.write(f"{result.difference}\t{result.exchange.url}\t{result.detail}\n")
    if not json:
        parts = [f"{number} {name}" for name, number in sorted(counts.items())]
        sys.stdout.write(f"{', '.join(parts) or 'the recording is empty'}\n")
    return 0 if not counts or set(counts) <= {"same", "skipped"} else 1


def _open(state: Path | None, task: str, revision: str | None) -> Recording:
    """Raises BadRequestError if there is no such recording, and SettingsError if it cannot be read."""
    path = _find(state, task, revision)
    try:
        return Recording.open(path)
    except RecordingError as error:
        raise SettingsError(str(error)) from None


def _find(state: Path | None, task: str, revision: str | None) -> Path:
    folder = (state or default_state()) / FOLDER
    found: list[Path] = []
    known: set[str] = set()
    for path in find_recordings(folder):
        belongs_to = _summary(path).id
        known.add(belongs_to.task)
        if task in (
            belongs_to.task,
            f"{belongs_to.suite}:{belongs_to.task}",
        ) and belongs_to.revision.startswith(revision or ""):
            found.append(path)
    if not found:
        listed = f"; there are recordings of {', '.join(sorted(known))}" if known else ""
        raise BadRequestError(f"there is no recording of {task!r} in {folder}{listed}")
    if len(found) > 1:
        several = ", ".join(f"{path.parent.parent.name} {path.stem}" for path in found)
        raise BadRequestError(
            f"there are several recordings of {task!r}: choose one with --revision: {several}"
        )
    return found[0]


def _summary(path: Path) -> Summary:
    try:
        with ExitStack() as stack:
            return stack.enter_context(Recording.open(path)).summary()
    except RecordingError as error:
        raise SettingsError(str(error)) from None


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.id.suite}:{summary.id.task}",
        summary.id.revision,
        summary.launch_time.isoformat(timespec="seconds"),
        f"{summary.exchanges} exchanges",
        f"{summary.body_bytes / (1 << 20):.1f} MiB",
        _rate(summary),
    )


def _rate(summary: Summary) -> str:
    if summary.rate is None:
        return "no other rollout yet"
    verdict = "runnable" if summary.runnable else f"under {RUNNABLE_RATE:.0%}"
    return f"{summary.rate:.1%} of other rollouts' requests ({verdict})"


def _summary_json(summary: Summary) -> dict[str, Any]:
    return {
        "suite": summary.id.suite,
        "revision": summary.id.revision,
        "task": summary.id.task,
        "launch_time": summary.launch_time.isoformat(),
        "exchange_count": summary.exchanges,
        "bytes": summary.body_bytes,
        "rollout_count": summary.rollouts,
        "hit_rate": summary.rate,
        "runnable": summary.runnable,
    }


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
