"""Short forms of `python -m benchmarks`: they fail on errors and on what is left behind, never on times."""

from __future__ import annotations

import pytest

from benchmarks.running import Options
from benchmarks.sections import SECTIONS, measure

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(600)]

# `density` needs many episodes, and `proxies` the package registries.
SHORT = [name for name in SECTIONS if name not in {"density", "proxies"}]


@pytest.mark.parametrize("section", SHORT)
async def test_section_measures_all_its_figures_and_leaves_nothing_behind(
    section: str, test_image: str
) -> None:
    result = await measure(section, Options.short(test_image))
    assert result.errors == ()
    assert set(result.remaining.values()) == {0}
    assert result.figures
    assert result.skipped == {}
