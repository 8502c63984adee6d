"""The failures that are expected, each with its reason, and how a report is held against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tests.conformance.suites import Report


class Group(BaseModel):
    """Failures with one reason: patterns of `scenario/check`, in runs whose names match."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str = Field(min_length=20)
    runs: tuple[str, ...] = Field(min_length=1)
    checks: tuple[str, ...] = Field(min_length=1)

    def covers(self, run: str) -> bool:
        return any(fnmatchcase(run, pattern) for pattern in self.runs)


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole list."""

    groups: tuple[Group, ...]

    def patterns(self, run: str) -> Iterator[str]:
        for group in self.groups:
            if group.covers(run):
                yield from group.checks

    def complaints(self, run: str, report: Report) -> list[str]:
        """One sentence for each failure that is not listed, and each listed one that did not fail.

        A listed failure of a scenario that the run does not have is no complaint.
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
