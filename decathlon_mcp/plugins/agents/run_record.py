"""The record of a run's attempts, from the rows of a state folder: `run` plays only missing attempts."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decathlon_client.results import Result
from decathlon_client.resume import AttemptKey, Revisions
from decathlon_client.values import ATTEMPT, Verdict

from decathlon_mcp.cli.output import printed
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeDetails, EpisodeQuery, EpisodeSummary
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
        self._attempts: dict[AttemptKey, tuple[EpisodeDetails, Verdict]] = {}
        self._revisions = Revisions(f"the run {printed(run)}")
        history = EpisodeHistory([state])
        for summary in _scored(history, run):
            number = summary.labels.get(ATTEMPT, "")
            if not (number.isascii() and number.isdecimal() and len(number) < 10):
                continue
            place = AttemptKey(summary.task, 0, int(number))
            if place in self._attempts:
                continue  # of an older episode
            details = history.episode(summary.public_id)
            if details is None or details.verdict is None:
                continue
            verdict = Verdict.read(details.verdict)
            if not without_calls and is_without_call(verdict):
                self.discarded += 1
                continue
            self._revisions.check(summary.task, verdict.raw)
            self._attempts[place] = (details, verdict)

    def count(self, tasks: list[str], attempts: int) -> int:
        """How many of these attempts have a verdict."""
        wanted = set(tasks)
        return sum(place.task in wanted and place.attempt < attempts for place in self._attempts)

    def launch_time(self, task: str, occurrence: int) -> str | None:
        return next(
            (
                details.launch_time
                for place, (details, _) in self._attempts.items()
                if (place.task, place.occurrence) == (task, occurrence)
            ),
            None,
        )

    def result(self, place: AttemptKey, index: int, group: int) -> Result[Any] | None:
        if place not in self._attempts:
            return None
        details, verdict = self._attempts[place]
        summary = details.summary
        return Result(
            index=index,
            task=place.task,
            group=group,
            attempt=place.attempt,
            episode=summary.public_id,
            played=None,
            verdict=verdict,
            failure=None,
            fault=None,
            seconds=(summary.ended_at or summary.started_at) - summary.started_at,
            resumed=True,
        )

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


def _scored(history: EpisodeHistory, run: str) -> Iterator[EpisodeSummary]:
    """The episodes of a run that have a reward, the newest first."""
    return history.all_episodes(EpisodeQuery(run=run, live=False, lost=False))
