"""The file of a batch that can be started again: one JSON line for each verdict."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from decathlon_client.batch_results import Result
from decathlon_client.client_values import JsonObject, Verdict, as_object

NEEDED = frozenset({"run", "task", "occurrence", "attempt", "verdict"})

BEGINNING = b'{"run": '
"""Of every line that `append` writes."""


class AttemptKey(NamedTuple):
    """An episode of a batch: of the task's `occurrence`-th mention the `attempt`-th, both from 0.

    A place has no index, so that tasks may be added to the batch, and their order changed.
    """

    task: str
    occurrence: int
    attempt: int


class VerdictRecord(Protocol):
    """What of a batch has a verdict already, and is not played again. `VerdictFile` is one."""

    @property
    def run(self) -> str | None:
        """The name of the run that the verdicts are of; None if there is none."""
        ...

    def launch_time(self, task: str, occurrence: int) -> str | None:
        """The launch time of a group that was played in part; None if none of it was played."""
        ...

    def result(self, place: AttemptKey, index: int, group: int) -> Result[Any] | None:
        """The result of an episode that has a verdict; None if it has none."""
        ...

    def append(self, place: AttemptKey, result: Result[Any], run: str, launch_time: str | None) -> None:
        """Take a result that was played now. Raises OSError or ValueError, which end the batch."""
        ...


class RevisionError(ValueError):
    """Verdicts on one task are of several revisions of its suite."""


class Revisions:
    """The revision of its suite that the verdicts on each task are of, which must be one. `where`: theirs."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._known: dict[str, tuple[object, object]] = {}

    def check(self, task: str, verdict: Mapping[str, Any]) -> None:
        """Raises RevisionError for a verdict of another revision than earlier verdicts on this task."""
        revision = verdict.get("suite"), verdict.get("suite_revision")
        known = self._known.setdefault(task, revision)
        if known != revision:
            raise RevisionError(
                f"{self._where} has verdicts of {task} in {_name(known)}, and the server has "
                f"{_name(revision)}; name another file to resume"
            )


class VerdictFile:
    """Reads what a batch has played, and appends to it. It is locked: one batch at a time may use a file.

    Raises ValueError if another batch uses the file, or naming the line that is not one of a batch; OSError
    if it cannot be read or written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._lines: dict[AttemptKey, JsonObject] = {}
        self._revisions = Revisions(f"the file {path} of verdicts")
        self._end = 0
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        # Not by a file beside it, which a process that is killed would leave. Windows has no `fcntl`.
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self._path}: another batch uses this file to resume; each process needs its own"
                ) from None

    def _read(self) -> None:
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(BEGINNING[: len(line)]):
                break  # the process was killed while it wrote; the next line replaces it
            self._end += len(line)
            record = _read(line)
            if record is None:
                raise ValueError(
                    f"{self._path}: line {number} is no verdict of a batch; name another file to resume"
                )
            self._lines[AttemptKey(record["task"], record["occurrence"], record["attempt"])] = record
            self._revisions.check(record["task"], record["verdict"])

    def close(self) -> None:
        """Let other batches use the file."""
        if sys.platform != "win32":
            import fcntl

            # A process that was forked meanwhile has the file open too, and would keep it locked.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    @property
    def run(self) -> str | None:
        """The name of the run that the first verdict is of; None if there is none."""
        return next((str(record["run"]) for record in self._lines.values()), None)

    def launch_time(self, task: str, occurrence: int) -> str | None:
        """The launch time of a group that was played in part; None if none of it was played."""
        for place, record in self._lines.items():
            if (place.task, place.occurrence) == (task, occurrence):
                return record.get("launch_time")
        return None

    def result(self, place: AttemptKey, index: int, group: int) -> Result[Any] | None:
        """The result of an episode that has a verdict here."""
        record = self._lines.get(place)
        if record is None:
            return None
        return Result(
            index=index,
            task=place.task,
            group=group,
            attempt=place.attempt,
            episode=record.get("episode"),
            played=None,
            verdict=Verdict.read(record["verdict"]),
            failure=None,
            fault=None,
            seconds=float(record.get("seconds", 0.0)),
            page=record.get("page"),
            resumed=True,
        )

    def append(self, place: AttemptKey, result: Result[Any], run: str, launch_time: str | None) -> None:
        """Write the result, if it has a verdict: the others are played again.

        Raises OSError, and ValueError if the file has verdicts of the task in another revision of its suite.
        """
        if result.verdict is None:
            return
        raw = result.verdict.raw
        self._revisions.check(place.task, raw)
        record = {
            "run": run,
            **place._asdict(),
            "suite": raw.get("suite"),
            "suite_revision": raw.get("suite_revision"),
            "launch_time": launch_time,
            "episode": result.episode,
            "page": result.page,
            "seconds": round(result.seconds, 3),
            "verdict": dict(raw),
        }
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._file.truncate(self._end)  # removes a line that was never finished
        self._file.seek(self._end)
        self._file.write(line)
        self._file.flush()
        self._end += len(line)


@contextmanager
def verdict_record(
    resume: str | PathLike[str] | VerdictRecord | None,
) -> Generator[VerdictRecord | None]:
    """The record that a batch is resumed from; a file is locked as long as the body runs."""
    if not isinstance(resume, (str, os.PathLike)):
        yield resume
        return
    verdicts = VerdictFile(resume)
    try:
        yield verdicts
    finally:
        verdicts.close()


def _name(revision: tuple[object, object]) -> str:
    return f"revision {revision[1]} of {revision[0]}"


def _read(line: bytes) -> JsonObject | None:
    """The line's object; None if `append` does not write such objects."""
    try:
        record = as_object(json.loads(line))
        if record is None or not record.keys() >= NEEDED:
            return None
        Verdict.read(record["verdict"])
    except (ValueError, KeyError, TypeError):
        return None
    return record
