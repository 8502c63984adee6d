"""Connections to drivers, and servers, that end at any moment."""

from __future__ import annotations

import anyio
import pytest

from decathlon_mcp.driver.client import connect
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_connecting_that_is_cancelled_at_any_moment_leaves_nothing(real: Bench) -> None:
    finished = False

    async def one() -> None:
        nonlocal finished
        async with real.provider.open(real.spec()) as sandbox, connect(sandbox) as driver:
            await driver.ping()
        finished = True

    for step in range(60):
        with anyio.move_on_after(step * 0.024):
            await one()
        await real.wait_until_nothing_left()
        if finished and step > 5:
            break
    assert finished


@pytest.mark.parametrize(
    "real",
    ["plain", pytest.param("docker", marks=(pytest.mark.docker, pytest.mark.long))],
    indirect=True,
)
@pytest.mark.slow
async def test_sweep_after_a_server_that_was_killed_at_any_moment_leaves_nothing(real: Bench) -> None:
    """Sandboxes that survive, and none of another owner's."""
    async with real.provider.open(real.new_spec()) as other:
        for step in range(6):
            specs = [real.new_spec(survives=True) for _ in range(4)]
            async with real.killed_server(specs, wait_for="opening"):
                await anyio.sleep(step * (0.004 if real.engine is None else 0.1))
            # The engine may still be creating a container that the dead server has requested.
            while len(await real.resources()) > 1 + (real.engine is None):
                await real.provider.sweep(real.former_owner)
        assert await other.is_running()
