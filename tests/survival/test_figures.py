"""Short forms of `python -m benchmarks.survival`."""

from __future__ import annotations

import pytest

from benchmarks.survival.deaths import measure_deaths
from benchmarks.survival.soak import measure_soak

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.long
async def test_no_episode_is_lost_by_the_death_of_a_server_and_nothing_is_left_by_any_death() -> None:
    deaths = await measure_deaths("host", count=8, at_once=4)
    assert deaths.errors == []
    assert deaths.lost("server") == 0
    assert deaths.lost("client") == deaths.lost("batch") == 0
    assert {victim: left.count for victim, left in deaths.leftovers.items()} == dict.fromkeys(
        ("server", "driver", "tool server", "client", "batch"), 0
    )


@pytest.mark.long
async def test_clients_that_vanish_or_cancel_leave_no_episode_open() -> None:
    soak = await measure_soak("fake", episodes=60, at_once=8)
    assert soak.errors == []
    assert soak.open_at_end == 0
