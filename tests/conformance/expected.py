"""Expected failures with their reasons, and the comparison of a report with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tests.conformance.suites import Report


class Group(BaseModel):
    """Failures with one reason: patterns of `scenario/check`, for runs whose names match `runs`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str = Field(min_length=20)
    runs: tuple[str, ...] = Field(min_length=1)
    checks: tuple[str, ...] = Field(min_length=1)

    def covers(self, run: str) -> bool:
        return any(fnmatchcase(run, pattern) for pattern in self.runs)


@dataclass(frozen=True, slots=True)
class Expected:
    """All expected failures."""

    groups: tuple[Group, ...]

    def patterns(self, run: str) -> Iterator[str]:
        for group in self.groups:
            if group.covers(run):
                yield from group.checks

    def problems(self, run: str, report: Report) -> list[str]:
        """One sentence for each unlisted failure, and for each listed failure that did not happen.

        Listed failures of scenarios that the run does not have are ignored.
        """
        patterns = tuple(self.patterns(run))
        unlisted = [
            f"{name} failed: {check.message}"
            for name, check in report.failed.items()
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        stale = [
            f"{pattern} is listed as an expected failure and did not fail"
            for pattern in patterns
            if any(fnmatchcase(scenario, pattern.partition("/")[0]) for scenario in report.scenarios)
            and not any(fnmatchcase(name, pattern) for name in report.failed)
        ]
        return unlisted + stale


def load(file: Path) -> Expected:
    groups = TypeAdapter(tuple[Group, ...]).validate_python(yaml.safe_load(file.read_text()))
    return Expected(groups)
