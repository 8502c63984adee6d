"""Calls of a server that dies: each runs once, and the next server has its reply."""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import pytest
from decathlon_sandbox import wire

from decathlon_mcp.driver.driver_messages import Notification
from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.episodes.call import (
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    Call,
    KnownCalls,
    Waiter,
    call_digest,
)
from decathlon_mcp.storage.trajectory import RequestKeys
from decathlon_mcp.types import JsonObject, as_json

pytestmark = pytest.mark.slow


def noted(number: int, size_bytes: int = 0) -> Notification:
    params = {"level": "info", "data": "x" * size_bytes, "number": number}
    return Notification(wire.MESSAGE, as_json(params))


async def what_a_slow_caller_sees(notifications: Iterable[Notification]) -> list[int]:
    """The notifications that a caller handles if all others come while it handles the first one."""
    seen: list[int] = []
    resume = anyio.Event()

    class SlowWaiter(Waiter):
        async def on_notification(self, params: JsonObject, *, is_progress: bool) -> None:
            seen.append(params["number"])
            await resume.wait()

    call = Call(seq=1, digest="")
    call.add(waiter := SlowWaiter())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call.wait, waiter)
        await anyio.wait_all_tasks_blocked()
        for notification in notifications:
            call.on_notification(notification)
            if not seen:
                await anyio.wait_all_tasks_blocked()
        # The outcome comes after them.
        call.end(Reply(b"{}"))
        resume.set()
    return seen


@pytest.mark.anyio
async def test_one_of_two_requests_that_come_at_once_gets_the_reply_of_a_lost_call() -> None:
    known, settled = KnownCalls(), anyio.Event()

    class LostWaiter(Waiter):
        async def is_gone(self) -> bool:
            await settled.wait()
            return True

    keys = RequestKeys(session="s")
    lost = Call(seq=1, digest="d", keys=keys, waiters=[LostWaiter()])
    known.add(lost)
    found: list[Call | None] = []

    async def come() -> None:
        call = await known.find(keys, "d")
        if call is not None:
            call.add(Waiter())
        found.append(call)

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(come)
        await anyio.wait_all_tasks_blocked()
        settled.set()
    assert found == [lost, None]


@pytest.mark.anyio
async def test_notifications_for_a_slow_caller_are_bounded_and_the_oldest_are_dropped() -> None:
    assert await what_a_slow_caller_sees(map(noted, range(5))) == [0, 1, 2, 3, 4]
    many = await what_a_slow_caller_sees(map(noted, range(MAX_QUEUED + 11)))
    assert many == [0, *range(11, MAX_QUEUED + 11)]
    long = await what_a_slow_caller_sees(noted(number, MAX_QUEUED_BYTES // 8) for number in range(50))
    assert long == [0, *range(43, 50)]


@pytest.mark.anyio
async def test_a_caller_gets_no_notification_that_mcp_does_not_allow() -> None:
    invalid = [Notification(wire.MESSAGE, text) for text in (b"7", b"{", b'{"data": 1}', b"[" * 1000)]
    assert await what_a_slow_caller_sees([noted(0), *invalid, noted(1)]) == [0, 1]


def test_the_digest_of_a_call_depends_on_values_and_not_on_their_order() -> None:
    digest = call_digest("tool", as_json({"a": 1, "b": {"c": [1, 2], "d": "\ud800"}}))
    assert digest == call_digest("tool", as_json({"b": {"d": "\ud800", "c": [1, 2]}, "a": 1}))
    assert call_digest("tool", None) == call_digest("tool", b" {\n} ")
    others = [{"a": 2}, {"a": "1"}, {"a": True}, {"a": None}, {"a": [1]}, {"b": 1}]
    assert len({call_digest("tool", as_json(arguments)) for arguments in [{"a": 1}, *others]}) == 7
    assert call_digest("tool", b"{}") != call_digest("toolx", b"{}")
