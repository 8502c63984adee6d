"""The lease of an episode."""

from __future__ import annotations

import math

import anyio
import pytest

from decathlon_mcp.episodes.lease import Lease

pytestmark = pytest.mark.anyio


async def test_the_idle_limit_cancels_the_body() -> None:
    lease = Lease(idle_seconds=0.05, absolute_seconds=60)
    with anyio.fail_after(5), lease.limit() as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not lease.absolute_expired


async def test_a_held_lease_does_not_expire_and_is_renewed_on_release() -> None:
    lease = Lease(idle_seconds=0.2, absolute_seconds=60)
    with anyio.fail_after(5), lease.limit() as scope:
        with lease.hold():
            assert lease.deadline == math.inf
            lease.start()
            assert anyio.current_time() + 50 < lease.deadline < math.inf
            await anyio.sleep(0.3)
        assert lease.deadline > anyio.current_time()
        assert not scope.cancel_called


async def test_the_absolute_limit_also_ends_a_held_lease_and_counts_from_its_start() -> None:
    lease = Lease(idle_seconds=60, absolute_seconds=0.05)
    with anyio.fail_after(5), lease.limit() as scope, lease.hold():
        await anyio.sleep(0.1)
        assert not lease.absolute_expired
        lease.start()
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert lease.absolute_expired


async def test_end_cancels_the_body_now_or_on_entry() -> None:
    lease = Lease(idle_seconds=60, absolute_seconds=60)
    with lease.limit() as scope:
        lease.end()
        assert lease.expired
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    with lease.limit() as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_suspended_lease_neither_expires_nor_can_be_ended() -> None:
    lease = Lease(idle_seconds=0.01, absolute_seconds=60)
    with lease.limit() as scope:
        lease.suspend()
        lease.end()
        await anyio.sleep(0.02)
        assert scope.deadline == math.inf
        assert not scope.cancel_called
