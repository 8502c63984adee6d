"""The script that counts what there is to read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from benchmarks.weight import (
    ALL_PLACES,
    BUDGETS,
    ROOT,
    Lines,
    Place,
    follow_episode,
    over_budget,
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


def test_a_package_over_its_budget_is_named() -> None:
    found = {name: Lines(code=budget) for name, budget in BUDGETS.items()}
    assert over_budget(found) == {}
    assert over_budget({**found, "http": Lines(code=1_700, blank=5)}) == {"http": 5}


def test_the_check_fails_exactly_for_packages_over_their_budgets() -> None:
    command = [sys.executable, "-m", "benchmarks.weight", "--check", "--json"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    over = over_budget(package_lines())
    assert checked.returncode == (1 if over else 0)
    assert all(f"{name} by {lines:,} lines" in checked.stderr for name, lines in over.items())
    assert json.loads(checked.stdout)["packages"]["http"]["budget"] == BUDGETS["http"]


@pytest.mark.long
@pytest.mark.parametrize("place", ALL_PLACES)
def test_an_episode_is_followed_through_client_and_server(place: Place) -> None:
    parts = anyio.run(follow_episode, place)
    files: Mapping[str, set[str]] = {name: executed.files for name, executed in parts.items()}
    assert "clients/decathlon_client/episode.py" in files["a repeated call"]
    assert ("decathlon_mcp/http/application.py" in files["a repeated call"]) is (place == "HTTP")
    assert "decathlon_mcp/grading/grader.py" in files["an evaluation"]
    assert len(parts["a repeated call"].lines) < len(parts["a first call"].lines)
    assert all(executed.lines <= parts["an episode"].lines for executed in parts.values())
    assert not any(file.startswith("sandbox/") for file in files["an episode"])
