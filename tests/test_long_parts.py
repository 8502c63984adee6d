"""Which long tests are overdue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.long_parts import MAX_AGE, PARTS, PartRun, overdue, read_runs

NOW = datetime(2026, 11, 24, tzinfo=UTC)


def test_a_part_is_overdue_unless_it_passed_in_the_last_week() -> None:
    parts = list(PARTS)
    runs = {part: PartRun(at=NOW, commit="abc", passed=True) for part in parts[3:]}
    runs[parts[0]] = PartRun(at=NOW - MAX_AGE - timedelta(days=1), commit="abc", passed=True)
    runs[parts[1]] = PartRun(at=NOW, commit="def", passed=False)
    assert overdue(runs, NOW) == [
        f"{parts[0]}: last passed on 2026-11-16 at abc",
        f"{parts[1]}: failed on 2026-11-24 at def",
        f"{parts[2]}: no run is recorded",
    ]


def test_each_part_names_a_program_that_exists() -> None:
    for arguments in PARTS.values():
        target = next(
            argument for argument in arguments if "." in argument or argument in ("benchmarks", "tests")
        )
        path = Path(target if target.endswith(".py") else target.replace(".", "/"))
        assert path.exists() or path.with_suffix(".py").exists(), target


def test_recorded_runs_are_of_known_parts() -> None:
    assert read_runs().keys() <= PARTS.keys()
