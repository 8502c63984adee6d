"""Which long tests are overdue."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import long_parts
from tests.long_parts import PARTS, PartRun, changed_since, has_run, overdue, read_runs

AT = datetime(2026, 11, 16, tzinfo=UTC)


def test_a_part_is_overdue_unless_it_passed_on_the_code_that_it_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_parts, "changed_since", lambda commit, paths: commit == "old")  # pyright: ignore
    parts = list(PARTS)
    runs = {part: PartRun(at=AT, commit="new", passed=True) for part in parts[3:]}
    runs[parts[0]] = PartRun(at=AT, commit="old", passed=True)
    runs[parts[1]] = PartRun(at=AT, commit="new", passed=False)
    assert overdue(runs) == [
        f"{parts[0]}: the code has changed since it passed on 2026-11-16 at old",
        f"{parts[1]}: failed on 2026-11-16 at new",
        f"{parts[2]}: no run is recorded",
    ]


def test_a_commit_that_the_clone_does_not_have_is_another_one() -> None:
    assert changed_since("0" * 40, ("pyproject.toml",))


def test_each_part_names_a_program_that_exists() -> None:
    for part in PARTS.values():
        target = next(
            argument for argument in part.arguments if "." in argument or argument in ("benchmarks", "tests")
        )
        path = Path(target if target.endswith(".py") else target.replace(".", "/"))
        assert path.exists() or path.with_suffix(".py").exists(), target
        assert [covered for covered in part.covers if not Path(covered).exists()] == []


def test_recorded_runs_are_of_known_parts() -> None:
    assert read_runs().keys() <= PARTS.keys()


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_part_whose_tests_are_all_skipped_has_not_run(tmp_path: Path, skipped: int) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f'<testsuites><testsuite tests="2" skipped="{skipped}"/></testsuites>')
    assert has_run(report) == (skipped == 1)
