"""How long an episode lives."""

from __future__ import annotations

import math

import anyio
import pytest

from decathlon_mcp.episodes.lease import Lease

pytestmark = pytest.mark.anyio


async def test_what_is_inside_is_cancelled_when_nobody_asks() -> None:
    lease = Lease(idle_seconds=0.05, absolute_seconds=60)
    with anyio.fail_after(5), lease.limit() as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not lease.absolute_expired


async def test_who_holds_it_keeps_it_and_it_is_renewed_on_release() -> None:
    lease = Lease(idle_seconds=0.2, absolute_seconds=60)
    with anyio.fail_after(5), lease.limit() as scope:
        with lease.hold():
            assert lease.deadline == math.inf
            lease.start()
            assert anyio.current_time() + 50 < lease.deadline < math.inf
            await anyio.sleep(0.3)
        assert lease.deadline > anyio.current_time()
        assert not scope.cancel_called


async def test_the_absolute_lease_is_over_whoever_holds_it() -> None:
    lease = Lease(idle_seconds=60, absolute_seconds=0.05)
    with anyio.fail_after(5), lease.limit() as scope, lease.hold():
        await anyio.sleep(0.1)
        assert not lease.absolute_expired
        lease.start()
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert lease.absolute_expired


async def test_it_can_be_ended_and_suspended() -> None:
    lease = Lease(idle_seconds=60, absolute_seconds=60)
    with lease.limit() as scope:
        lease.end()
        assert lease.expired
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    with lease.limit() as scope:
        lease.suspend()
        lease.end()
        await anyio.lowlevel.checkpoint()
        assert scope.deadline == math.inf
        assert not lease.expired
