"""The record of a run's attempts, from the rows of a state folder: `run` plays only missing attempts."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from decathlon_client.results import Result
from decathlon_client.resume import AttemptKey, Revisions
from decathlon_client.values import ATTEMPT, Verdict

from decathlon_mcp.cli.output import printed
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.storage.lock import create_state_folder

LOCKS = "runs.lock"
"""A file in the state folder of which each run that plays has locked one byte."""


class StoredAttempts:
    """The attempts of a run that have a verdict in a state folder; a batch's `VerdictRecord`.

    Of several verdicts on an attempt, which `--again-without-calls` makes, the newest counts.
    `without_calls`: whether verdicts on attempts without a call or a claim count. Blocks while it is made.
    Raises SettingsError.
    """

    def __init__(self, state: Path, run: str, *, without_calls: bool) -> None:
        self.run = run
        self.discarded = 0
        """Verdicts on attempts without a call that do not count."""
        self._results: dict[AttemptKey, Result[Any]] = {}
        self._launch_times: dict[str, str | None] = {}
        self._revisions = Revisions(f"the run {printed(run)}")
        history = EpisodeHistory([state])
        # The episodes that have a reward, the newest first.
        for summary in history.all_episodes(EpisodeQuery(run=run, live=False, lost=False)):
            number = summary.labels.get(ATTEMPT, "")
            if not (number.isascii() and number.isdecimal() and len(number) < 10):
                continue
            place = AttemptKey(summary.task, 0, int(number))
            details = None if place in self._results else history.episode(summary.public_id)
            if details is None or details.verdict is None:
                continue
            verdict = Verdict.read(details.verdict)
            if not without_calls and is_without_call(verdict):
                self.discarded += 1
                continue
            self._revisions.check(summary.task, verdict.raw)
            self._launch_times.setdefault(summary.task, details.launch_time)
            self._results[place] = Result(
                index=0,
                task=place.task,
                group=0,
                attempt=place.attempt,
                episode=summary.public_id,
                played=None,
                verdict=verdict,
                failure=None,
                fault=None,
                seconds=(summary.ended_at or summary.started_at) - summary.started_at,
                resumed=True,
            )

    def count(self, tasks: list[str], attempts: int) -> int:
        """How many of these attempts have a verdict."""
        return sum(place.task in tasks and place.attempt < attempts for place in self._results)

    def launch_time(self, task: str, occurrence: int) -> str | None:
        return self._launch_times.get(task)

    def result(self, place: AttemptKey, index: int, group: int) -> Result[Any] | None:
        known = self._results.get(place)
        return known and replace(known, index=index, group=group)

    def append(self, place: AttemptKey, result: Result[Any], run: str, launch_time: str | None) -> None:
        # The server has written its row.
        if result.verdict is not None:
            self._revisions.check(place.task, result.verdict.raw)


def is_without_call(verdict: Verdict) -> bool:
    """Whether a verdict is on an attempt that ended before its agent made a call or a claim."""
    return not verdict.metrics.get("calls") and not verdict.raw.get("claimed")


@contextmanager
def playing_alone(state: Path, run: str) -> Generator[None]:
    """Let no other process play this run while the body runs. Raises BadRequestError, SettingsError."""
    create_state_folder(state)
    # One byte for each run: a file for each would have to be removed, which no lock survives.
    place = int.from_bytes(hashlib.sha256(run.encode()).digest()[:7])
    with (state / LOCKS).open("a+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if not isinstance(error, (BlockingIOError, PermissionError)):
                raise
            raise BadRequestError(
                f"the run {printed(run)} is being played by another process; --run names another one"
            ) from None
        yield
