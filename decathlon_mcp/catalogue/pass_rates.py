"""Pass rates: how often each task was passed, counted from a file of verdicts."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.types import JsonObject, as_object

log = logging.getLogger("decathlon.suites")

MAX_RATED = 4_000
"""Episodes in current pass rates: the newest graded episodes. Reading them takes milliseconds."""
_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class PassRate:
    """Scored attempts at a task. `share` is the part that succeeded, 0.0 to 1.0."""

    passed: int
    attempts: int

    @property
    def share(self) -> float:
        return self.passed / self.attempts


@dataclass(frozen=True, slots=True)
class PassRates:
    """Pass rates, of a `file` of verdicts or of a server's episodes. A task without verdicts has none."""

    file: Path | None
    _counts: Mapping[tuple[str | None, str], PassRate] = field(repr=False)

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, suite: str, task_id: str) -> PassRate | None:
        """The pass rate of a task, over verdicts of its suite and verdicts without a suite."""
        keys = ((suite, task_id), (None, task_id), (None, f"{suite}:{task_id}"))
        rates = [self._counts[key] for key in keys if key in self._counts]
        if not rates:
            return None
        return PassRate(sum(rate.passed for rate in rates), sum(rate.attempts for rate in rates))

    def warn_of_unknown_suites(self, suites: Collection[str]) -> None:
        """Log the suites of verdicts that are not among `suites`; most likely a folder was renamed."""
        unknown = {suite for suite, _ in self._counts if suite is not None and suite not in suites}
        if unknown:
            log.warning(
                "results of unknown suites are ignored",
                extra={"fields": {"file": str(self.file), "suites": sorted(unknown), "here": [*suites]}},
            )


LiveRates: TypeAlias = Callable[[str | None, int | None, str | None], PassRates]
"""The pass rates of a server's episodes until now: of a run, of each task's last so many, of a token."""


def read_pass_rates(file: Path) -> PassRates:
    """Count the verdicts of a file of JSON objects, one after another, on one or several lines each.

    Used are `task` (a task's id or its catalogue id), `suite` if present, and `success`; a verdict without
    `success` was not scored and does not count. Raises SettingsError naming the line.
    """
    passed, attempts = Counter[tuple[str | None, str]](), Counter[tuple[str | None, str]]()
    for line, verdict in _objects(file):
        task, suite, success = verdict.get("task"), verdict.get("suite"), verdict.get("success")
        if not isinstance(task, str) or not isinstance(success, bool | None):
            raise SettingsError(
                f"--results: {file}, line {line}: not a verdict: `task` must be a name and `success` true, "
                "false or not there"
            )
        if success is None:
            continue
        key = (suite, task.removeprefix(f"{suite}:")) if isinstance(suite, str) else (None, task)
        attempts[key] += 1
        passed[key] += success
    return PassRates(file, {key: PassRate(passed[key], count) for key, count in attempts.items()})


def _objects(file: Path) -> Iterator[tuple[int, JsonObject]]:
    """Each object of the file, with the number of the line where it begins."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"--results: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--results: {file}: not UTF-8") from None
    decoder, at, line, counted = json.JSONDecoder(), 0, 1, 0
    while (at := _skip_whitespace(text, at)) < len(text):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"--results: {file}, line {line}: not JSON: {error}") from None
        if (verdict := as_object(value)) is None:
            raise SettingsError(f"--results: {file}, line {line}: an object was expected")
        yield line, verdict


def _skip_whitespace(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITESPACE:
        at += 1
    return at
