"""The link to a driver: requests and notifications, with a scripted peer as the driver."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import pytest
from anyio.abc import TaskGroup
from decathlon_sandbox import wire

from decathlon_mcp.driver import link as link_module
from decathlon_mcp.driver import stream as stream_module
from decathlon_mcp.driver.driver_messages import Notification, read_answer
from decathlon_mcp.driver.link import READ_IN_THREAD_BYTES, DriverLink
from decathlon_mcp.errors import (
    CallTimeoutError,
    DriverError,
    LimitExceededError,
)
from decathlon_mcp.plugins.tunnels import Tunnels
from decathlon_mcp.types import JsonObject
from tests.driver.peer import until
from tests.driver_client.support import FIRST_ID, Peer, ScriptedSandbox, connection, payload

pytestmark = pytest.mark.anyio

TOO_MANY = "the driver sent an invalid reply: the JSON text has more than 1,000 values and keys"
TOO_DEEP = "the driver sent an invalid reply: the JSON text is nested deeper than 128 levels"


@asynccontextmanager
async def linked(**options: Any) -> AsyncGenerator[tuple[DriverLink, Peer]]:
    """A client that reads, and its peer."""
    async with connection() as (stream, peer), anyio.create_task_group() as tasks:
        link = DriverLink(ScriptedSandbox(stream), **options)
        tasks.start_soon(link.receive)
        link.attach()
        yield link, peer
        tasks.cancel_scope.cancel()


class Request:
    """A request that runs in a task; `outcome` is its result or error once `done` is set."""

    def __init__(self, tasks: TaskGroup, link: DriverLink, method: str = wire.PING, **options: Any):
        self.done = anyio.Event()
        self.outcome: Any = None
        tasks.start_soon(self._run, link, method, options)

    async def _run(self, link: DriverLink, method: str, options: dict[str, Any]) -> None:
        try:
            self.outcome = await link.request(method, {}, **options)
        except Exception as error:  # noqa: BLE001
            self.outcome = error
        self.done.set()

    async def result(self) -> Any:
        await self.done.wait()
        return self.outcome


# Requests and replies


@pytest.mark.parametrize(
    ("line", "count"),
    [(b'{"id":77,"result":0}', 300), (b'{"method":"data","params":{"conn":7,"data":"eA=="}}', 30)],
    ids=["unknown ids", "bytes of tunnels"],
)
async def test_millions_of_lines_are_read_slowly(
    monkeypatch: pytest.MonkeyPatch, line: bytes, count: int
) -> None:
    monkeypatch.setattr(stream_module, "READ_BYTES_BURST", 100 * stream_module.LINE_COST_BYTES)
    monkeypatch.setattr(stream_module, "READ_BYTES_PER_SECOND", 1000 * stream_module.LINE_COST_BYTES)
    async with linked() as (link, peer), anyio.create_task_group() as tasks:
        link.channel = Tunnels(link.notify, tasks.start_soon)
        request = Request(tasks, link)
        number = (await peer.receive())["id"]
        started = anyio.current_time()
        await peer.send_payloads(*[line] * count, payload(id=number, result="done"))
        assert await request.result() == "done"
        later = Request(tasks, link)
        await peer.reply(await peer.receive(), "later")
        assert await later.result() == "later"
        assert anyio.current_time() - started >= 0.2


NESTED: list[JsonObject] = [{}] * 2000


@pytest.mark.parametrize(
    ("reply", "reason", "message"),
    [
        ({"error": {"code": wire.FILES, "message": "no such file"}}, "files", "no such file"),
        ({"error": {"code": 4711, "message": "?"}}, "driver_fault", "?"),
        ({"error": {"code": wire.SPAWN, "message": "x" * 5000}}, "spawn", "x" * 4000),
        ({"error": {"code": wire.SPAWN, "message": ["no text"]}}, "spawn", "spawn"),
        ({}, "invalid_reply", "the driver sent a reply that cannot be read"),
        ({"error": {"code": 1.0, "message": "code 1?"}}, "driver_fault", "code 1?"),
        ({"error": NESTED}, "driver_fault", "driver_fault"),
        ({"result": NESTED}, "invalid_reply", TOO_MANY),
        ({"result": json.loads("[" * 200 + "]" * 200)}, "invalid_reply", TOO_DEEP),
    ],
)
async def test_error_reply_is_a_driver_error(reply: JsonObject, reason: str, message: str) -> None:
    async with linked() as (link, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, link)
        await peer.send(id=(await peer.receive())["id"], **reply)
        error = await request.result()
        assert isinstance(error, DriverError)
        assert (error.message, error.data) == (message, {"reason": reason})


# Cancellation and time-outs


async def test_request_without_a_reply_in_time_is_cancelled_in_the_driver() -> None:
    async with linked() as (link, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, link, timeout_seconds=0.01)
        number = (await peer.receive())["id"]
        assert await peer.receive() == {"jsonrpc": "2.0", "method": "cancel", "params": {"id": number}}
        error = await request.result()
        assert isinstance(error, CallTimeoutError)
        assert (error.message, error.data) == ("no answer to ping within 0.01 s", {"seconds": 0.01})


# Notifications


class Observed:
    """A request, and what comes for it, in order: its notifications, and its outcome last."""

    def __init__(self, link: DriverLink) -> None:
        self.events: list[Any] = []
        self.done = anyio.Event()
        link.send(link.new_request_id(), wire.CALL, {}, _result, self._end, self._notify)

    def _notify(self, notification: Notification) -> None:
        self.events.append((notification.method, notification.decoded()))

    def _end(self, outcome: Any) -> None:
        self.events.append(outcome)
        self.done.set()


def _result(payload: bytes) -> Any:
    return json.loads(bytes(read_answer(payload).result or b"null"))


async def test_notifications_reach_the_request_with_their_id_alone() -> None:
    async with linked() as (link, peer):
        first, second = Observed(link), Observed(link)
        first_request, second_request = await peer.receive(), await peer.receive()
        unrelated: list[JsonObject] = [
            {"id": 99, "params": {"text": "unknown id"}},
            {"id": str(first_request["id"]), "params": {"text": "id as text"}},
            {"params": {"text": "id is missing"}},
        ]
        for params in unrelated:
            await peer.send(method=wire.MESSAGE, params=params)
        await peer.send(method=wire.MESSAGE, params="no object")
        await peer.send(method="unknown", params={"id": first_request["id"], "params": {"text": "unknown"}})
        await peer.send(id=77, method=wire.MESSAGE, params={"id": first_request["id"], "params": {}})
        for request, text in ((second_request, "b"), (first_request, "a")):
            await peer.send(method=wire.MESSAGE, params={"id": request["id"], "params": {"text": text}})
            await peer.reply(request, {})
        await first.done.wait()
        await second.done.wait()
    assert first.events == [(wire.MESSAGE, {"text": "a"}), {}]
    assert second.events == [(wire.MESSAGE, {"text": "b"}), {}]


async def test_notifications_above_the_rate_and_over_the_size_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "NOTIFICATION_BYTES_BURST", 5 * link_module.NOTIFICATION_COST_BYTES)
    monkeypatch.setattr(link_module, "NOTIFICATION_BYTES_PER_SECOND", 0.01)
    async with linked() as (link, peer):
        observed = Observed(link)
        number = (await peer.receive())["id"]
        too_long = {"n": -1, "text": "x" * wire.MAX_NOTIFICATION_BYTES}
        for params in (too_long, *({"n": n} for n in range(100))):
            await peer.send(method=wire.MESSAGE, params={"id": number, "params": params})
        await peer.send(id=number, result="done")
        await observed.done.wait()
    assert observed.events == [*((wire.MESSAGE, {"n": n}) for n in range(5)), "done"]


async def test_outcome_that_cannot_be_handled_ends_no_other_request() -> None:
    def fail(outcome: object) -> None:
        raise RuntimeError("no room")

    async with linked() as (link, peer), anyio.create_task_group() as tasks:
        link.send(link.new_request_id(), wire.CALL, {}, _result, fail)
        await peer.reply(await peer.receive(), {})
        other = Request(tasks, link)
        await peer.reply(await peer.receive(), "fine")
        assert await other.result() == "fine"


async def long_reply_in_thread(link: DriverLink, peer: Peer, outcomes: list[Any]) -> threading.Event:
    """Send a request whose long reply is being read in a thread, until the event is set."""
    reading, resume = anyio.Event(), threading.Event()

    def read(payload: bytes) -> str:
        anyio.from_thread.run_sync(reading.set)
        resume.wait(10)
        return "long"

    link.send(link.new_request_id(), wire.CALL, {"max_bytes": 1 << 20}, read, outcomes.append)
    await peer.reply(await peer.receive(), "x" * READ_IN_THREAD_BYTES)
    await reading.wait()
    return resume


async def test_replies_after_a_long_one_are_ignored_while_it_is_read() -> None:
    async with linked() as (link, peer), anyio.create_task_group() as tasks:
        outcomes: list[Any] = []
        resume = await long_reply_in_thread(link, peer, outcomes)
        await peer.send(id=FIRST_ID, result="second")
        await peer.send(id=None, error={"code": wire.PARSE, "message": "what?"})
        other = Request(tasks, link)
        await peer.reply(await peer.receive(), "other")
        await other.result()
        assert outcomes == []
        resume.set()
        await until(lambda: bool(outcomes))
        assert outcomes == ["long"]


# The end of the connection


async def test_message_over_the_limit_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 1000)
    async with linked() as (link, peer), anyio.create_task_group() as tasks:
        with pytest.raises(LimitExceededError):
            await link.request(wire.PING, {"text": "x" * 1000})
        request = Request(tasks, link)
        await peer.reply(await peer.receive(), "done")
        assert await request.result() == "done"
