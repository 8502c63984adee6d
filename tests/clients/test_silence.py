"""Broken connections are logged by this client in a line, and never by the SDK."""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio
import pytest
from decathlon_client import ClientError, Decathlon, Lockstep

from tests.clients.relay import Relay, relayed
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

COUNT = ("probe__count", {"to": 2, "pause": 100})


async def stop_listening(relay: Relay, eps: Lockstep) -> None:
    """Calls are cancelled while no new connection is accepted: their notifications fail."""
    started = anyio.Event()

    async def report(progress: float, total: float | None, message: str | None) -> None:
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: eps[0].episode.call(*COUNT, on_progress=report))
        await started.wait()
        await relay.stop_listening()
        tasks.cancel_scope.cancel()


async def refuse_when_idle(relay: Relay, eps: Lockstep) -> None:
    await relay.refuse()


async def cut_in_a_call(relay: Relay, eps: Lockstep) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: eps.call({slot: [COUNT] for slot in eps}))
        await anyio.sleep(0.5)
        await relay.refuse()


@pytest.mark.parametrize("fault", [stop_listening, refuse_when_idle, cut_in_a_call])
async def test_broken_connections_are_not_logged_by_the_sdk(
    served: Served, caplog: pytest.LogCaptureFixture, fault: object
) -> None:
    caplog.set_level(logging.WARNING)
    async with relayed(served) as (relay, url):
        with suppress(ClientError):
            async with Decathlon(url, resend_seconds=0.2) as d, d.lockstep(["find-answer"] * 5) as eps:
                await fault(relay, eps)  # type: ignore[operator]
    lines = [record.getMessage() for record in caplog.records if not record.name.startswith("decathlon.")]
    assert lines == []
    assert sum(record.name == "decathlon.client" for record in caplog.records) <= 1
