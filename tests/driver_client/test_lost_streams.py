"""The link to a driver: streams that are slow, lost and opened again, with a scripted peer as the driver."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream, TaskGroup
from decathlon_sandbox import wire
from decathlon_sandbox.lines import body_of_ids

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver import stream as stream_module
from decathlon_mcp.driver.driver_messages import read_answer
from decathlon_mcp.driver.link import DriverLink
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.errors import (
    CallTimeoutError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.types import JsonObject
from tests.driver.peer import until
from tests.driver_client.support import (
    Peer,
    ScriptedSandbox,
    connection,
    payload,
    stream_pair,
)

pytestmark = pytest.mark.anyio
RECONNECT = ReconnectPolicy(seconds=60, generation=1)
OLD_ID = (1 << wire.COUNTER_BITS) + 1


class ReopenedSource(ScriptedSandbox):
    """A stream to `peer` that can be opened again, after the `failures`."""

    def __init__(self, peer: Peer, stream: ByteStream, tasks: TaskGroup) -> None:
        super().__init__(stream)
        self.peer = peer
        self.failures: list[Exception] = []
        self.reopened = 0
        self._tasks = tasks

    async def reopen(self) -> None:
        self.reopened += 1
        if self.failures:
            raise self.failures.pop(0)
        client, driver = stream_pair()
        await self.stream.aclose()
        await self.peer.replace_stream(driver)
        self._tasks.start_soon(self.peer.run)
        self.stream = client


class Forgotten(set[int]):
    """The ids of a driver that denies having had a request."""

    def add(self, element: int) -> None:
        pass


@asynccontextmanager
async def surviving(
    reconnect: ReconnectPolicy = RECONNECT,
) -> AsyncGenerator[tuple[DriverLink, ReopenedSource, TaskGroup]]:
    """A client whose stream can be opened again; its peer is that of the source."""
    async with connection() as (stream, peer), background_tasks() as tasks:
        source = ReopenedSource(peer, stream, tasks)
        link = DriverLink(source, reconnect=reconnect)
        tasks.start_soon(link.receive)
        link.attach()
        await link.ready_or_closed.wait()
        try:
            yield link, source, tasks
        finally:
            link.close()
            await source.stream.aclose()
            await peer.aclose()


async def outcome_of(link: DriverLink, outcomes: list[Any], timeout_seconds: float | None = None) -> None:
    try:
        outcomes.append(await link.request(wire.PING, {}, timeout_seconds=timeout_seconds))
    except (SandboxLostError, CallTimeoutError) as error:
        outcomes.append(error)


def send(link: DriverLink, method: str, params: JsonObject, outcomes: list[Any]) -> int:
    link.send(number := link.new_request_id(), method, params, read_answer, outcomes.append)
    return number


async def test_requests_wait_for_room_and_one_that_is_cancelled_meanwhile_is_not_sent() -> None:
    async with surviving() as (link, source, _):
        peer, text, outcomes = source.peer, {"text": "x" * (30 << 20)}, list[Any]()
        numbers = [send(link, "large", text, outcomes) for _ in range(4)]
        link.send(link.new_request_id(), "urgent", {}, read_answer, lambda _: None, urgent=True)
        first, _, urgent = [await peer.receive() for _ in range(3)]
        assert urgent["method"] == "urgent"
        link.cancel(numbers[2])
        await peer.reply(first, {})
        assert (await peer.receive())["id"] == numbers[3]
        assert len(outcomes) == 1
        link.close()
        assert outcomes[1:] == [None, None]
        send(link, "late", {}, outcomes)
        assert outcomes[3:] == [None]


# Streams that are opened again


async def test_engine_that_does_not_come_back_in_time_loses_the_sandbox() -> None:
    async with surviving(reconnect=ReconnectPolicy(1, 1)) as (link, source, _):
        source.failures = [ProviderUnavailableError("no engine") for _ in range(100)]
        await source.peer.end()
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "sandbox lost: its stream could not be opened again within 1 s"
        assert not error.data.get("running")
        assert source.reopened < 10


async def test_driver_that_ends_each_of_its_streams_is_at_fault() -> None:
    async with surviving(ReconnectPolicy(seconds=1, generation=1)) as (link, source, _):
        reopen = source.reopen

        async def reopen_and_end() -> None:
            await reopen()
            await source.peer.end()

        source.reopen = reopen_and_end
        await source.peer.end()
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "sandbox lost: its stream could not be opened again within 1 s"
        assert error.data.get("running")


async def test_time_without_a_driver_does_not_count_for_time_outs() -> None:
    async with surviving() as (link, source, tasks):
        outcomes: list[Any] = []
        tasks.start_soon(outcome_of, link, outcomes, 0.3)
        request = await source.peer.receive()
        source.failures = [ProviderUnavailableError("no engine") for _ in range(4)]
        await source.peer.end()
        await anyio.sleep(0.6)
        assert outcomes == []
        await source.peer.reply(request, "in time")
        await until(lambda: bool(outcomes))
        assert outcomes == ["in time"]


async def test_driver_that_does_not_answer_on_an_open_stream_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(stream_module, "ANSWER_SECONDS", (0.1, 0.1))
    async with surviving() as (link, source, _):
        source.peer.run = anyio.sleep_forever  # pyright: ignore[reportAttributeAccessIssue]
        await source.peer.end()
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "sandbox lost: the driver has not answered for 0 s"
        assert error.data.get("running")


async def test_driver_that_demands_attachments_does_not_stop_time_outs() -> None:
    """It would hold a capture, and the places of others, for as long as it likes."""
    async with surviving() as (link, source, tasks):
        peer, outcomes, flush = source.peer, list[Any](), source.peer.flush

        async def answer_late_and_demand() -> None:
            await anyio.sleep(1.5)
            await flush()
            await peer.send_bytes(b"damaged\n")

        tasks.start_soon(outcome_of, link, outcomes, 1.0)
        await peer.receive()
        peer.flush = answer_late_and_demand
        await peer.send_bytes(b"damaged\n")
        with anyio.fail_after(4):
            await until(lambda: bool(outcomes))
        assert isinstance(outcomes[0], CallTimeoutError)


async def test_driver_that_demands_attachments_is_resent_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may say of every request that it never had it, and they have up to 80 MiB."""
    monkeypatch.setattr(stream_module, "ATTACH_SECONDS", 0.0)
    monkeypatch.setattr(stream_module, "READ_BYTES_PER_SECOND", 1 << 20)
    monkeypatch.setattr(stream_module, "READ_BYTES_BURST", 4 << 20)
    async with surviving() as (link, source, _):
        peer = source.peer
        monkeypatch.setattr(peer.connection.requests, "_used_ids", Forgotten())
        send(link, wire.PING, {"text": "x" * (1 << 20)}, [])
        await peer.receive()
        before, began_at = peer.connection.attachments, time.monotonic()
        for _ in range(200):
            await peer.send_bytes(b"damaged\n")
            await anyio.sleep(0.005)
        # Each costs a MiB: the burst has four, and each second brings one.
        seconds = time.monotonic() - began_at
        assert before < peer.connection.attachments <= before + 6 + seconds


async def test_driver_that_repeats_that_it_never_had_a_request_gets_it_once() -> None:
    """A line of ten bytes must not be worth a request of a MiB, or a second of them 16 GiB of memory."""
    async with surviving() as (link, source, _):
        peer, size_bytes = source.peer, 1 << 20
        number = send(link, wire.PING, {"text": "x" * size_bytes}, [])
        await peer.receive()
        await peer.send_bytes(b"damaged\n")  # only what an attachment has named can be unknown
        await until(lambda: peer.connection.attachments > 1 and link.is_attached)
        written = 0
        write = link._write  # pyright: ignore[reportPrivateUsage]

        def count(*bodies: bytes, again: bool = False) -> None:
            nonlocal written
            written += sum(map(len, bodies))
            write(*bodies, again=again)

        link._write = count  # pyright: ignore[reportPrivateUsage]
        await peer.send_payloads(*[body_of_ids(b"unknown", [number])] * 200)
        await peer.send(id=number, result=None)
        await until(lambda: not link._pending_ids())  # pyright: ignore[reportPrivateUsage]
        assert written <= 2 * size_bytes


# Another server process


@asynccontextmanager
async def reattached(
    *ids: int, replied: bool, unanswered: tuple[int, ...] = ()
) -> AsyncGenerator[tuple[DriverLink, Peer]]:
    """A link to a driver that has these requests, or their replies, of another server process."""
    async with connection() as (stream, peer), background_tasks() as tasks:
        for number in ids:
            peer.connection.requests.receive(payload(id=number, method=wire.CALL, params={}))
            request = await peer.receive()
            if replied:
                await peer.reply(request, {})
        link = DriverLink(
            ScriptedSandbox(stream), reconnect=ReconnectPolicy(60, 2), reattached=True, unanswered=unanswered
        )
        tasks.start_soon(link.receive)
        link.attach()
        yield link, peer


async def done(link: DriverLink, peer: Peer) -> None:
    """Wait until the driver keeps no response any more: the next request says so."""
    send(link, wire.PING, {}, [])
    await until(lambda: not peer.connection.requests.response_bytes)


async def test_replies_that_nobody_waits_for_are_not_kept() -> None:
    async with reattached(OLD_ID, OLD_ID + 1, OLD_ID + 2, replied=True) as (_, peer):
        assert peer.connection.requests.response_bytes
        await until(lambda: peer.connection.attachments and not peer.connection.requests.response_bytes)


@pytest.mark.parametrize("replied", [True, False], ids=["the reply is kept", "it runs"])
async def test_call_that_is_cancelled_instead_of_sent_again_holds_no_reply(replied: bool) -> None:
    async with reattached(OLD_ID, replied=replied, unanswered=(OLD_ID,)) as (link, peer):
        await link.ready_or_closed.wait()
        await anyio.wait_all_tasks_blocked()
        link.cancel(OLD_ID)
        # It may still run.
        assert (await peer.receive())["params"] == {"id": OLD_ID}
        if not replied:
            await peer.reply({"id": OLD_ID}, 7)
            assert peer.connection.requests.response_bytes
        await done(link, peer)
