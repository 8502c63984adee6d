"""The lease of an episode."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import anyio
import pytest

from decathlon_mcp.episodes.lease import Lease
from decathlon_mcp.episodes.specification import EpisodeLimits

pytestmark = pytest.mark.anyio

LONG = EpisodeLimits(
    idle_seconds=3600,
    first_use_seconds=3600,
    grace_seconds=3600,
    episode_seconds=3600,
    servers_seconds=1,
    preprocess_seconds=1,
    set_up_seconds=1,
    evaluation_seconds=1,
    workspace_bytes=1,
)


def new_lease(**seconds: float) -> Lease:
    return Lease(replace(LONG, **seconds))


async def test_the_grace_waits_for_requests_in_progress_and_only_their_answers_end_it() -> None:
    lease = new_lease(grace_seconds=1)
    answered, unanswered = lease.acquire(), lease.acquire()
    lease.lose_client()
    assert lease.deadline == math.inf
    unanswered.release(answered=False)
    unanswered.release()
    assert lease.deadline == math.inf, "a second release does nothing"
    answered.release()
    assert lease.deadline > anyio.current_time() + 60
    unanswered = lease.acquire()
    unanswered.release(answered=False)
    assert lease.deadline > anyio.current_time() + 60, "no connection is known to be broken"
    unanswered = lease.acquire()
    lease.lose_client()
    before = time.monotonic()
    unanswered.release(answered=False)
    assert before + 1 <= lease.deadline < before + 2, "the grace begins with the end of the last request"


async def test_a_client_that_no_longer_waits_is_lost_only_until_the_episode_is_ready() -> None:
    lease = new_lease(grace_seconds=1)
    lease.lose_client(until_ready=True)
    assert lease.deadline < anyio.current_time() + 2
    lease.mark_ready()
    assert lease.deadline > anyio.current_time() + 60
    lease.lose_client(until_ready=True)
    assert lease.deadline > anyio.current_time() + 60
