"""The script that counts what there is to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.weight import (
    BUDGETS,
    package_lines,
    package_of,
    sources,
)


def test_a_new_folder_of_the_server_needs_an_entry() -> None:
    with pytest.raises(KeyError, match=r"decathlon_mcp/new/a\.py is in no package"):
        package_of(Path("decathlon_mcp/new/a.py"))


def test_every_line_of_the_product_is_counted_in_one_package() -> None:
    packages = package_lines()
    assert sum(lines.all for lines in packages.values()) == sum(
        len(path.read_text().splitlines()) for path in sources()
    )
    assert all(packages[name].modules for name in BUDGETS)
    assert sum(BUDGETS.values()) == 38_000
