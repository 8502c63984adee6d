"""The count of what there is to read, and the page of performance, which is made of figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.sections import SECTIONS
from benchmarks.weight import (
    BUDGETS,
    over_budget,
    package_lines,
    package_of,
    sources,
)
from docs import performance


def test_a_new_folder_of_the_server_needs_an_entry() -> None:
    with pytest.raises(KeyError, match=r"decathlon_mcp/new/a\.py is in no package"):
        package_of(Path("decathlon_mcp/new/a.py"))


def test_every_line_of_the_product_is_counted_in_one_package() -> None:
    packages = package_lines()
    assert sum(lines.all for lines in packages.values()) == sum(
        len(path.read_text().splitlines()) for path in sources()
    )
    assert all(packages[name].modules for name in BUDGETS)


def test_each_package_of_the_core_is_within_its_budget() -> None:
    assert over_budget(package_lines()) == {}
    assert sum(BUDGETS.values()) == 38_000


def test_performance_page_and_its_plots_are_up_to_date() -> None:
    files = performance.files(figures.read(SECTIONS))
    outdated = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
    unused = {path.name for path in performance.IMAGES.glob("performance-*.svg")} - {
        path.name for path in files
    }
    assert (outdated, unused) == ([], set()), "update them with: python docs/performance.py"
