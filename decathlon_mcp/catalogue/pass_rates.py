"""How often each task has been passed, from a file of verdicts: what is known of its difficulty."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.types import JsonObject, as_object

log = logging.getLogger("decathlon.suites")

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class PassRate:
    """Of `attempts` that were scored, the share that succeeded: 0.0 to 1.0."""

    passed: int
    attempts: int

    @property
    def share(self) -> float:
        return self.passed / self.attempts


@dataclass(frozen=True, slots=True)
class PassRates:
    """`file` is where they are from. A task that no verdict is about has no figure."""

    file: Path
    _counts: dict[tuple[str | None, str], PassRate] = field(repr=False)

    def of(self, suite: str, task_id: str) -> PassRate | None:
        """Those of the suite and those that name none, together."""
        keys = ((suite, task_id), (None, task_id), (None, f"{suite}:{task_id}"))
        found = [self._counts[key] for key in keys if key in self._counts]
        if not found:
            return None
        return PassRate(sum(each.passed for each in found), sum(each.attempts for each in found))

    def warn_of_strangers(self, suites: Collection[str]) -> None:
        """Say which suites the verdicts are of that are not here: a folder that was renamed, most likely."""
        strangers = {suite for suite, _ in self._counts if suite is not None and suite not in suites}
        if strangers:
            log.warning(
                "results of suites that are not here are passed over",
                extra={"fields": {"file": str(self.file), "suites": sorted(strangers), "here": [*suites]}},
            )


def read_pass_rates(file: Path) -> PassRates:
    """Count the verdicts of a file: JSON objects, one a line or simply one after another.

    What counts is `task` (as the server spells it, or bare), `suite` where it is there, and `success`; what
    has no `success` was not scored and is no attempt. Raises SettingsError, naming the line.
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
    """Each object of the file with the line where it begins."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"--results: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--results: {file}: not UTF-8") from None
    decoder, at, line, counted = json.JSONDecoder(), 0, 1, 0
    while (at := _skipped(text, at)) < len(text):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"--results: {file}, line {line}: not JSON: {error}") from None
        if (found := as_object(value)) is None:
            raise SettingsError(f"--results: {file}, line {line}: an object was expected")
        yield line, found


def _skipped(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
