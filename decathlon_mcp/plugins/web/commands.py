"""`recordings`: list, show, prune, compare and export what `--web record` has stored, without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import httpx2
from cyclopts import App, Parameter

from decathlon_mcp import __version__
from decathlon_mcp.cli.options import Flag, StateFolder
from decathlon_mcp.cli.output import print_json, print_lines
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, SettingsError
from decathlon_mcp.plugins.web.exchanges import REDACTED, Part, WebResponse
from decathlon_mcp.plugins.web.recording import (
    FOLDER,
    Exchange,
    Recording,
    RecordingError,
    Summary,
    delete,
    find_recordings,
)
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.lock import check_state_folder

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
AT_ONCE = 4
TIMEOUT_SECONDS = 30.0
"""How long a site may be silent."""
MAX_BYTES = 64 << 20
"""Longer responses are not read to their end, and count as different."""
USER_AGENT = f"decathlon-mcp/{__version__}"
UNKNOWN = -1
"""A size or a duration that is not known (HAR 1.2)."""


@recordings.command(name="list")
def list_recordings(*, as_json: AsJson = False, state: StateFolder = None) -> int:
    """List the recordings, each with the share of other rollouts' requests that it answered."""
    folder = _folder(state)
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


def _folder(state: Path | None) -> Path:
    """The recordings of a state folder, by default of the default one. Raises SettingsError."""
    check_state_folder(state or default_state())
    return (state or default_state()) / FOLDER


def _find(state: Path | None, task: str, revision: str | None) -> Path:
    folder = _folder(state)
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


Difference = Literal["same", "different", "status", "unreachable", "skipped"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One exchange and the live web. `detail`: what differs, or why it was skipped."""

    exchange: Exchange
    difference: Difference
    detail: str = ""


def compare_with_web(exchanges: Sequence[Exchange]) -> Iterator[Comparison]:
    """Ask the sites again, a few at once; the results are in the order of the addresses. Blocks.

    Only the first response to each GET is compared. Requests with credentials are skipped, since the
    recording has none, and so are requests that may change something.
    """
    first = {(exchange.url, exchange.method): exchange for exchange in reversed(exchanges)}
    # A redirect is a response of its own in a recording, and recorded bodies have no content encoding.
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    with (
        httpx2.Client(headers=headers, timeout=TIMEOUT_SECONDS) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        asked = (first[name] for name in sorted(first))
        yield from pool.map(partial(_ask_again, client), asked)


def _ask_again(client: httpx2.Client, exchange: Exchange) -> Comparison:
    if exchange.method != "GET":
        return Comparison(exchange, "skipped", f"{exchange.method} is not repeated")
    if REDACTED in exchange.url:
        return Comparison(exchange, "skipped", "it needs credentials, which are not recorded")
    if exchange.status == 206:
        return Comparison(exchange, "skipped", "it is a part of a page")
    digest, size = hashlib.sha256(), 0
    try:
        with client.stream("GET", exchange.url) as response:
            for chunk in response.iter_raw(1 << 16):
                size += len(chunk)
                digest.update(chunk)
                if size > MAX_BYTES:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        return Comparison(exchange, "unreachable", str(error) or type(error).__name__)
    if response.status_code != exchange.status:
        return Comparison(exchange, "status", f"{response.status_code}, recorded {exchange.status}")
    if size > MAX_BYTES or digest.hexdigest() != exchange.body:
        return Comparison(exchange, "different", f"{size} bytes, recorded {exchange.size}")
    return Comparison(exchange, "same")


def har(recording: Recording) -> Iterator[str]:
    """The parts of a HAR 1.2 file (HTTP Archive), one exchange at a time. Blocks. Raises RecordingError.

    Request headers and bodies are not in a recording. Bodies of responses are any bytes, and so in base64.
    Fields of our own begin with an underscore, as the format asks for.
    """
    belongs_to = recording.id
    about = {
        "version": "1.2",
        "creator": {"name": "decathlon-mcp", "version": __version__},
        "comment": f"{belongs_to.suite}:{belongs_to.task}, revision {belongs_to.revision}, launch time "
        f"{recording.launch_time.isoformat()}",
    }
    yield f'{{"log": {json.dumps(about)[:-1]}, "entries": ['
    for number, exchange in enumerate(recording.exchanges()):
        yield f"{',' if number else ''}\n{json.dumps(_entry(exchange, recording.response(exchange)))}"
    yield "\n]}}\n"


def _entry(exchange: Exchange, response: WebResponse) -> dict[str, Any]:
    return {
        "startedDateTime": exchange.recorded_at,
        "time": 0,
        "request": {
            "method": exchange.method,
            "url": _text(exchange.url),
            "httpVersion": "HTTP/1.1",
            "cookies": [],
            "headers": [{"name": "Host", "value": _text(urlsplit(exchange.url).netloc)}],
            "queryString": [
                {"name": _text(name), "value": _text(value)}
                for name, value in parse_qsl(urlsplit(exchange.url).query, keep_blank_values=True)
            ],
            "headersSize": UNKNOWN,
            "bodySize": UNKNOWN,
        },
        "response": {
            "status": exchange.status,
            "statusText": _text(response.reason),
            "httpVersion": "HTTP/1.1",
            "cookies": [],
            "headers": [
                {"name": _text(name), "value": _text(value)} for name, value in response.headers.items
            ],
            "content": {
                "size": len(response.body),
                "mimeType": _text(response.headers.get("content-type")),
                "text": base64.b64encode(response.body).decode("ascii"),
                "encoding": "base64",
            },
            "redirectURL": _text(response.headers.get("location")),
            "headersSize": UNKNOWN,
            "bodySize": UNKNOWN,
        },
        "cache": {},
        "timings": {"send": 0, "wait": 0, "receive": 0},
        "_part": exchange.part,
        "_number": exchange.number,
    }


def _text(value: str) -> str:
    """What readers can encode: bytes that are not UTF-8 become replacement characters."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
