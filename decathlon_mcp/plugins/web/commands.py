"""`recordings`: list, show, prune, compare and export what `--web record` has stored, without a server."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, get_args

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import Flag, StateFolder
from decathlon_mcp.cli.output import print_json, print_lines
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, SettingsError
from decathlon_mcp.plugins.web.exchanges import Part
from decathlon_mcp.plugins.web.recording import (
    FOLDER,
    Recording,
    RecordingError,
    Summary,
    delete,
    find_recordings,
)
from decathlon_mcp.settings import default_state

recordings = App(name="recordings", help="List, show, prune, compare and export recordings of the web.")

Task = Annotated[str, Parameter(name="TASK", help="A task, or `suite:task`.")]
Revision = Annotated[
    str | None,
    Parameter(
        metavar="TEXT",
        show_default=False,
        help="Beginning of the suite's revision, if there are recordings of several.",
    ),
]
AsJson = Annotated[Flag, Parameter(name="--json", help="Print one JSON object.")]
AsJsonLines = Annotated[Flag, Parameter(name="--json", help="Print one JSON object a line.")]


def add_commands(app: App) -> None:
    app.command(recordings)


@recordings.command(name="list")
def list_recordings(*, as_json: AsJson = False, state: StateFolder = None) -> int:
    """List the recordings, each with the share of other rollouts' requests that it answered."""
    folder = (state or default_state()) / FOLDER
    summaries = [_summary(path) for path in find_recordings(folder)]
    if as_json:
        print_json({"recordings": [_summary_json(summary) for summary in summaries]}, indent=None)
        return 0
    print_lines(map(_cells, summaries))
    if not summaries:
        report(f"there are no recordings in {folder}")
    return 0


@recordings.command
def show(
    task: Task, /, *, revision: Revision = None, as_json: AsJson = False, state: StateFolder = None
) -> int:
    """Print a task's recording: exchanges, requests without an answer, and the rollouts that used it."""
    with _open(state, task, revision) as recording:
        summary, exchanges = recording.summary(), recording.exchanges()
        rollouts, unanswered = recording.rollouts(), recording.unanswered()
    if as_json:
        names = ("part", "number", "method", "url", "status", "recorded_at")
        value = {
            **_summary_json(summary),
            "exchanges": [
                {**{name: getattr(exchange, name) for name in names}, "bytes": exchange.size}
                for exchange in exchanges
            ],
            "rollouts": [
                {"episode": each.episode, "mode": each.mode, "at": each.at, **asdict(each.counts)}
                for each in rollouts
            ],
            "unanswered": [asdict(request) for request in unanswered],
        }
        print_json(value, indent=None)
        return 0
    print_lines([_cells(summary), ()])
    print_lines((each.part, each.method, each.status, each.size, each.url) for each in exchanges)
    print_lines([()])
    for each in unanswered:
        why = f"recorded failure: {each.failure}" if each.failure else "missed"
        print_lines([(each.part, each.method, f"{each.count} times", why, each.url)])
    print_lines([()] if unanswered else [])
    for each in rollouts:
        counts = ", ".join(f"{number} {name}" for name, number in asdict(each.counts).items() if number)
        print_lines([(each.at[:19], each.mode, each.episode, counts)])
    return 0


@recordings.command
def prune(
    task: Task,
    /,
    *,
    url: Annotated[str | None, Parameter(metavar="PATTERN", show_default=False)] = None,
    part: Annotated[str | None, Parameter(metavar="PART", show_default=False)] = None,
    revision: Revision = None,
    state: StateFolder = None,
) -> int:
    """Delete a task's recording, or the exchanges whose address matches a pattern.

    Parameters
    ----------
    url
        Delete only exchanges of these addresses (`*`, `?`, `[...]`), such as `https://arxiv.org/*`.
    part
        Delete only exchanges of this part: `preprocess`, `agent` or `grader`.
    """
    if part not in (None, *get_args(Part)):
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
def compare(
    task: Task, /, *, revision: Revision = None, as_json: AsJsonLines = False, state: StateFolder = None
) -> int:
    """Ask the sites of a recording again and print what has changed. Exit status 0 only if nothing has."""
    from decathlon_mcp.plugins.web.comparison import compare as compare_with_web

    with _open(state, task, revision) as recording:
        exchanges = recording.exchanges()
    counts = Counter[str]()
    for result in compare_with_web(exchanges):
        counts[result.difference] += 1
        if as_json:
            difference, detail = result.difference, result.detail
            document = {"url": result.exchange.url, "difference": difference, "detail": detail}
            print_json(document, indent=None)
        elif result.difference != "same":
            print_lines([(result.difference, result.exchange.url, result.detail)])
    if not as_json:
        parts = [f"{number} {name}" for name, number in sorted(counts.items())]
        sys.stdout.write(f"{', '.join(parts) or 'the recording is empty'}\n")
    return 0 if not counts or set(counts) <= {"same", "skipped"} else 1


@recordings.command
def export(
    task: Task,
    file: Annotated[Path | None, Parameter(name="FILE", show_default=False)] = None,
    /,
    *,
    revision: Revision = None,
    state: StateFolder = None,
) -> int:
    """Write a task's recording as a HAR 1.2 file, which `mitmweb -r FILE` and browsers open.

    Parameters
    ----------
    file
        A new file, readable by you only. [the standard output]
    """
    from decathlon_mcp.plugins.web.har import har

    with _open(state, task, revision) as recording, _new_file(file) as output:
        try:
            output.writelines(har(recording))
        except RecordingError as error:
            raise SettingsError(str(error)) from None
        count = len(recording.exchanges())
    if file is not None:
        sys.stdout.write(f"wrote {count} exchanges to {file}\n")
    return 0


@contextmanager
def _new_file(path: Path | None) -> Generator[IO[str]]:
    """Raises BadRequestError if it exists, or cannot be written."""
    if path is None:
        yield sys.stdout
        return
    try:
        # Pages may have what only its owner should read.
        with open(path, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as output:
            yield output
    except OSError as error:
        raise BadRequestError(f"{path}: {error.strerror}; name a new file") from None


def _open(state: Path | None, task: str, revision: str | None) -> Recording:
    """Raises BadRequestError if there is no such recording, and SettingsError if it cannot be read."""
    try:
        return Recording(_find(state, task, revision))
    except RecordingError as error:
        raise SettingsError(str(error)) from None


def _find(state: Path | None, task: str, revision: str | None) -> Path:
    folder = (state or default_state()) / FOLDER
    summaries = {path: _summary(path).id for path in find_recordings(folder)}
    found = [
        path
        for path, summary in summaries.items()
        if task in (summary.task, f"{summary.suite}:{summary.task}")
        and summary.revision.startswith(revision or "")
    ]
    if not found:
        known = ", ".join(sorted({summary.task for summary in summaries.values()}))
        listed = f"; there are recordings of {known}" if known else ""
        raise BadRequestError(f"there is no recording of {task!r} in {folder}{listed}")
    if len(found) > 1:
        several = ", ".join(f"{path.parent.parent.name} {path.stem}" for path in found)
        raise BadRequestError(
            f"there are several recordings of {task!r}: choose one with --revision: {several}"
        )
    return found[0]


def _summary(path: Path) -> Summary:
    try:
        with Recording(path) as recording:
            return recording.summary()
    except RecordingError as error:
        raise SettingsError(str(error)) from None


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.id.suite}:{summary.id.task}",
        summary.id.revision,
        summary.launch_time.isoformat(timespec="seconds"),
        f"{summary.exchanges} exchanges",
        f"{summary.body_bytes / (1 << 20):.1f} MiB",
        summary.rate_text,
    )


def _summary_json(summary: Summary) -> dict[str, Any]:
    return {
        **asdict(summary.id),
        "launch_time": summary.launch_time.isoformat(),
        "exchange_count": summary.exchanges,
        "bytes": summary.body_bytes,
        "rollout_count": summary.rollouts,
        "hit_rate": summary.rate,
        "runnable": summary.runnable,
    }
