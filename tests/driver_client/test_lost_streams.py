"""The link to a driver: streams that are slow, lost and opened again, with a scripted peer as the driver."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream, TaskGroup
from decathlon_sandbox import wire
from decathlon_sandbox.lines import body_of_ids
from decathlon_sandbox.requests import UsedIds

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver import stream as stream_module
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.link import MIN_BEAT_SECONDS, DriverLink, Heartbeat
from decathlon_mcp.driver.pending import Request, Survival
from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.driver.stream import Loss
from decathlon_mcp.errors import (
    CallTimeoutError,
    DecathlonError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.sandboxes.streams import DirectStream
from decathlon_mcp.types import JsonObject
from tests.driver.peer import until
from tests.driver_client.support import (
    FIRST_ID,
    MemoryByteStream,
    Peer,
    Source,
    connection,
    payload,
    stream_pair,
)

pytestmark = pytest.mark.anyio
SURVIVAL = Survival(seconds=60, generation=1)
OLD_ID, NEXT_ID = FIRST_ID, (2 << wire.COUNTER_BITS) + 1


class SlowStream(MemoryByteStream):
    """Writes the first half of an item at once and the rest once `resume` is set."""

    resume: anyio.Event

    async def send(self, item: bytes) -> None:
        middle = len(item) // 2
        await super().send(item[:middle])
        await self.resume.wait()
        await super().send(item[middle:])


class NarrowStream(DirectStream):
    """Takes a few bytes at once, and the rest once `resume` is set. With `broken`, it takes nothing."""

    def __init__(self, stream: MemoryByteStream) -> None:
        self.resume = anyio.Event()
        self.resume.set()
        self.broken = False
        self.room = 1 << 20
        self._stream = stream

    def send_now(self, data: bytes | memoryview) -> int:
        if self.broken:
            raise anyio.BrokenResourceError
        part = bytes(data[: self.room])
        self._stream._outgoing.send_nowait(part)  # pyright: ignore[reportPrivateUsage]
        return len(part)

    async def send(self, item: bytes) -> None:
        await self.resume.wait()
        await self._stream.send(item)

    async def receive_each(self, handler: Callable[[bytes], float]) -> None:
        while True:
            handler(await self.receive())

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._stream.receive(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class BrokenStream(ByteStream):
    """A stream that cannot be written to, and from which nothing comes."""

    async def send(self, item: bytes) -> None:
        raise anyio.BrokenResourceError

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.sleep_forever()
        raise NotImplementedError

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


class ReopenedSource:
    """A stream to `peer` that can be opened again, after the `failures`."""

    def __init__(self, peer: Peer, stream: ByteStream, tasks: TaskGroup) -> None:
        self.peer = peer
        self.stream = stream
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


def forget(used: UsedIds, request_id: int) -> bool:
    """What a driver says that denies having had a request."""
    return True


def ignore(*arguments: object) -> None:
    pass


async def describe_loss(loss: Loss) -> SandboxLostError:
    return SandboxLostError(loss.reason or "the stream ended", by_driver=loss.by_driver, cause=loss.cause)


@asynccontextmanager
async def surviving(
    survival: Survival = SURVIVAL,
) -> AsyncGenerator[tuple[DriverLink, ReopenedSource, TaskGroup]]:
    """A client whose stream can be opened again; its peer is that of the source."""
    async with connection() as (stream, peer), background_tasks() as tasks:
        source = ReopenedSource(peer, stream, tasks)
        link = DriverLink(source, describe_loss, survival=survival)
        tasks.start_soon(link.run)
        link.stream.attach()
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


# One stream


@asynccontextmanager
async def narrow_connection() -> AsyncGenerator[tuple[DriverLink, NarrowStream, Peer]]:
    client, driver = stream_pair()
    stream, peer = NarrowStream(client), Peer(driver, boots=False)
    async with background_tasks() as tasks:
        link = DriverLink(Source(stream), describe_loss)
        tasks.start_soon(peer.run)
        tasks.start_soon(link.run)
        link.stream.attach()
        await link.ready_or_closed.wait()
        yield link, stream, peer
        link.close()
        await stream.aclose()
        await driver.aclose()
        peer.close()


def request(link: DriverLink, method: str, params: JsonObject, outcomes: list[Any]) -> Request:
    return Request(link.new_id(), method, params, lambda message: message, outcomes.append)


async def test_what_a_stream_does_not_take_at_once_is_written_before_anything_else() -> None:
    async with narrow_connection() as (link, stream, peer):
        stream.room, stream.resume = 3, anyio.Event()
        assert link.send_now(request(link, "one", {}, []))
        assert link.send_now(request(link, "two", {}, []))
        await link.notify("three", {})
        await anyio.wait_all_tasks_blocked()
        stream.resume.set()
        with anyio.fail_after(10):
            assert [(await peer.receive())["method"] for _ in range(3)] == ["one", "two", "three"]


async def test_what_is_sent_in_a_quiet_moment_is_written_at_its_end() -> None:
    async with surviving() as (link, source, tasks), anyio.create_task_group() as requests:
        driver = DriverClient(link, tasks)
        with link.stream.quiet():
            requests.start_soon(driver.ping)
            with anyio.move_on_after(0.1) as scope:
                await source.peer.receive()
            assert scope.cancelled_caught
        with anyio.fail_after(1):
            request = await source.peer.receive()
        await source.peer.reply(request, {})


async def test_nothing_is_sent_now_without_room() -> None:
    async with narrow_connection() as (link, _, _):
        half = {"data": "x" * (wire.REQUEST_BUFFER_BYTES // 2)}
        assert [link.send_now(request(link, "one", half, [])) for _ in range(3)] == [True, False, False]


async def test_messages_to_a_stream_that_takes_them_slowly_are_written_whole() -> None:
    client, driver = stream_pair()
    slow = SlowStream(client._incoming, client._outgoing)  # pyright: ignore[reportPrivateUsage]
    slow.resume = anyio.Event()
    slow.resume.set()
    peer = Peer(driver, boots=False)
    async with background_tasks() as tasks:
        tasks.start_soon(peer.run)
        link = DriverLink(Source(slow), describe_loss)
        tasks.start_soon(link.run)
        link.stream.attach()
        await link.ready_or_closed.wait()
        slow.resume = anyio.Event()
        for number in range(3):
            await link.notify("count", {"number": number})
        await anyio.wait_all_tasks_blocked()
        slow.resume.set()
        assert [(await peer.receive())["params"] for _ in range(3)] == [{"number": n} for n in range(3)]
        link.close()
        await slow.aclose()
        await driver.aclose()
        peer.close()


async def test_peer_that_does_not_read_is_a_lost_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SEND_SECONDS", 0.01)
    client, driver = stream_pair()
    slow = SlowStream(client._incoming, client._outgoing)  # pyright: ignore[reportPrivateUsage]
    slow.resume = anyio.Event()
    async with background_tasks():
        with pytest.raises(SandboxLostError, match="has not read its input"):
            await DriverLink(Source(slow), describe_loss).send_bytes(b"text")
    await slow.aclose()
    await driver.aclose()


async def test_link_that_is_closed_does_not_wait_for_a_stream_that_takes_nothing() -> None:
    # The end of the connection waits for the task that writes.
    with anyio.fail_after(stream_module.SEND_SECONDS / 3):
        async with narrow_connection() as (link, stream, _):
            stream.room, stream.resume = 8, anyio.Event()
            await link.notify("stuck", {})
            await anyio.wait_all_tasks_blocked()
            link.close("the episode ended")


async def test_stream_is_opened_again_while_the_lost_one_takes_nothing() -> None:
    with anyio.fail_after(stream_module.SEND_SECONDS / 3):
        async with surviving() as (link, source, tasks):
            outcomes: list[Any] = []
            # Everything is read from the first stream, and written to one that is stuck.
            stuck, unread = stream_pair()
            link.stream._writer.stream = slow = SlowStream(stuck._incoming, stuck._outgoing)  # pyright: ignore[reportPrivateUsage]
            slow.resume = anyio.Event()
            tasks.start_soon(outcome_of, link, outcomes)
            await anyio.wait_all_tasks_blocked()
            await source.peer.end()
            await source.peer.reply(await source.peer.receive(), "fine")
            await until(lambda: outcomes == ["fine"])
            await stuck.aclose()
            await unread.aclose()


async def test_source_of_a_driver_is_written_whole_although_the_stream_is_lost_meanwhile() -> None:
    class Reopening(Source):
        began = anyio.Event()

        async def reopen(self) -> None:
            self.began.set()
            await anyio.sleep_forever()

    client, driver = stream_pair()
    slow = SlowStream(client._incoming, client._outgoing)  # pyright: ignore[reportPrivateUsage]
    slow.resume = anyio.Event()
    source = Reopening(slow)
    async with background_tasks() as tasks:
        link = DriverLink(source, describe_loss, survival=SURVIVAL)
        tasks.start_soon(link.run)
        tasks.start_soon(link.send_bytes, b"source")
        await anyio.wait_all_tasks_blocked()
        await driver.send_eof()
        with anyio.fail_after(10):
            await source.began.wait()
            slow.resume.set()
            received = b""
            while received != b"source":
                received += await driver.receive()
        link.close()
    await client.aclose()
    await driver.aclose()


async def test_request_waits_for_room() -> None:
    async with surviving() as (link, source, tasks):
        peer, text, outcomes, sent = source.peer, {"text": "x" * (30 << 20)}, list[Any](), list[int]()

        async def send() -> None:
            for number in range(3):
                await link.send(request(link, "large", text, outcomes))
                sent.append(number)

        tasks.start_soon(send)
        first, _ = await peer.receive(), await peer.receive()
        await anyio.wait_all_tasks_blocked()
        assert sent == [0, 1]
        await peer.reply(first, {})
        assert (await peer.receive())["params"] == text


async def test_request_that_is_cancelled_while_it_waits_for_room_is_not_sent() -> None:
    async with surviving() as (link, source, tasks):
        peer, text, outcomes = source.peer, {"text": "x" * (30 << 20)}, list[Any]()
        for _ in range(2):
            await link.send(request(link, "large", text, outcomes))
        first, _ = await peer.receive(), await peer.receive()
        waiting = request(link, "late", text, outcomes)
        tasks.start_soon(link.send, waiting)
        await anyio.wait_all_tasks_blocked()
        link.cancel(waiting.id)
        await peer.reply(first, {})
        await until(lambda: len(outcomes) == 1)
        await anyio.wait_all_tasks_blocked()
        await link.notify("next", {})
        assert (await peer.receive())["method"] == "next"
        assert len(outcomes) == 1


async def test_attachment_is_written_after_what_the_stream_did_not_take_at_once() -> None:
    async with narrow_connection() as (link, stream, peer):
        before = peer.connection.attachments
        await peer.send_bytes(b"damaged\n")
        attaching = link.stream._attaching  # pyright: ignore[reportPrivateUsage]
        await until(lambda: attaching is not None and attaching.is_due)
        stream.room = 10
        assert link.send_now(request(link, "call", {}, []))
        stream.room = 1 << 20
        # Before the next attempt, which comes after the first of ANSWER_SECONDS.
        with anyio.fail_after(stream_module.ANSWER_SECONDS[0] * 0.75):
            await until(lambda: peer.connection.attachments > before)
        assert (await peer.receive())["method"] == "call"


# Streams that are opened again


async def test_stream_is_opened_again_until_the_engine_answers() -> None:
    async with surviving() as (link, source, tasks):
        source.failures = [ProviderUnavailableError("no engine") for _ in range(4)]
        await source.peer.end()
        outcomes: list[Any] = []
        tasks.start_soon(outcome_of, link, outcomes)
        await source.peer.reply(await source.peer.receive(), "done")
        await until(lambda: bool(outcomes))
        assert outcomes == ["done"]
        assert source.reopened == 5


async def test_sandbox_that_has_ended_is_lost_with_its_cause() -> None:
    async with surviving() as (link, source, _):
        source.failures = [SandboxLostError("the first process has ended", cause="exit code 1")]
        await source.peer.end()
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "the first process has ended"
        assert error.data == {"by_driver": False, "cause": "exit code 1"}


async def test_engine_that_does_not_come_back_in_time_loses_the_sandbox() -> None:
    async with surviving(survival=Survival(1, 1)) as (link, source, _):
        source.failures = [ProviderUnavailableError("no engine") for _ in range(100)]
        await source.peer.end()
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "its stream could not be opened again within 1 s"
        assert not error.data["by_driver"]
        assert source.reopened < 10


async def test_driver_that_ends_each_of_its_streams_is_at_fault() -> None:
    async with surviving(Survival(seconds=1, generation=1)) as (link, source, _):
        reopen = source.reopen

        async def reopen_and_end() -> None:
            await reopen()
            await source.peer.end()

        source.reopen = reopen_and_end
        await source.peer.end()
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "its stream could not be opened again within 1 s"
        assert error.data["by_driver"]


async def test_stream_that_cannot_be_written_to_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "DRAIN_SECONDS", 0.05)
    async with connection() as (stream, peer), background_tasks() as tasks:
        source = ReopenedSource(peer, BrokenStream(), tasks)
        link = DriverLink(source, describe_loss, survival=SURVIVAL)
        tasks.start_soon(link.run)
        link.stream.attach()
        await link.ready_or_closed.wait()
        assert link.stream.was_attached
        link.close()
        await source.stream.aclose()
        await peer.aclose()
        await stream.aclose()


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
        assert error.message == "the driver has not answered for 0 s"
        assert error.data["by_driver"]


async def test_heartbeat_rests_while_the_driver_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LEASE_SECONDS", 0.9)
    async with surviving() as (link, source, _):
        heartbeat, beats = Heartbeat(link, boot_seconds=None), list[float]()
        monkeypatch.setattr(heartbeat, "_schedule", beats.append)
        heartbeat.start()
        heartbeat._beat()  # pyright: ignore[reportPrivateUsage]
        assert (await source.peer.receive())["method"] == wire.PING
        source.failures = [ProviderUnavailableError("no engine") for _ in range(100)]
        await anyio.sleep(0.85)
        await source.peer.end()
        await until(lambda: source.reopened > 0)
        assert not link.closed.is_set()
        heartbeat._beat()  # pyright: ignore[reportPrivateUsage]
        assert beats[-1] == MIN_BEAT_SECONDS


async def test_driver_that_demands_attachments_gets_few(monkeypatch: pytest.MonkeyPatch) -> None:
    async with surviving() as (link, source, tasks):
        peer = source.peer
        before = peer.connection.attachments
        for _ in range(20):
            await peer.send_bytes(b"damaged\n")
            await anyio.sleep(0.03)
        assert before < peer.connection.attachments <= before + 5
        outcomes: list[Any] = []
        tasks.start_soon(outcome_of, link, outcomes)
        await peer.reply(await peer.receive(), "fine")
        await until(lambda: bool(outcomes))
        assert outcomes == ["fine"]


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
        monkeypatch.setattr(UsedIds, "add", forget)
        await link.send(request(link, wire.PING, {"text": "x" * (1 << 20)}, []))
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
        waiting = request(link, wire.PING, {"text": "x" * size_bytes}, [])
        await link.send(waiting)
        await peer.receive()
        await peer.send_bytes(b"damaged\n")  # only what an attachment has named can be unknown
        await until(lambda: peer.connection.attachments > 1 and link.stream.is_attached)
        written = 0
        write = link.stream.write

        def count(*bodies: bytes, again: bool = False) -> None:
            nonlocal written
            written += sum(map(len, bodies))
            write(*bodies, again=again)

        link.stream.write = count
        await peer.send_payloads(*[body_of_ids(b"unknown", [waiting.id])] * 200)
        await peer.send(id=waiting.id, result=None)
        await until(lambda: not link.pending_ids())
        assert written <= 2 * size_bytes


@pytest.mark.parametrize("body", [b"unknown" + b" 1" * (1 << 21), b"unknown" + b" " * (1 << 22)])
async def test_driver_that_never_received_more_than_there_is_violates_the_protocol(body: bytes) -> None:
    """Reading the ids took half a second of the event loop, and 16 MiB of them are read in a second."""
    async with surviving() as (link, source, _):
        await link.send(request(link, wire.PING, {}, []))
        await source.peer.send_payloads(body)
        with anyio.fail_after(15):
            await link.closed.wait()
        error = await link.closed_error()
        assert "violated the protocol" in error.message
        assert error.data["by_driver"]


async def test_tunnels_do_not_survive_a_stream() -> None:
    async with surviving() as (link, source, _):
        tunnel = link.tunnels.create()
        await source.peer.end()
        await until(lambda: source.reopened > 0)
        with anyio.fail_after(10), pytest.raises(anyio.BrokenResourceError):
            await tunnel.receive()
        await tunnel.aclose()


# Another server process


@asynccontextmanager
async def reattached(
    *replies: bytes, unanswered: tuple[int, ...] = ()
) -> AsyncGenerator[tuple[DriverClient, Peer]]:
    """A client of a driver that has these messages from the time of another server process."""
    async with connection() as (stream, peer), background_tasks() as tasks:
        for reply in replies:
            peer.connection.send(reply)
            peer.connection.used_ids.add(json.loads(reply)["id"])
        link = DriverLink(
            Source(stream),
            describe_loss,
            survival=Survival(60, 2),
            reattached=True,
            unanswered=unanswered,
        )
        tasks.start_soon(link.run)
        link.stream.attach()
        yield DriverClient(link, tasks), peer


def call(driver: DriverClient, on_outcome: Callable[[Reply | DecathlonError | None], object]) -> Request:
    """The call of a server that died."""
    return driver.tool_call(OLD_ID, "files", {}, cut=None, on_outcome=on_outcome, on_notification=ignore)


async def test_request_ids_have_the_generation() -> None:
    async with reattached() as (driver, peer), background_tasks() as tasks:
        tasks.start_soon(driver.ping)
        request = await peer.receive()
        assert request["id"] == NEXT_ID
        await peer.reply(request, {})


async def test_kept_reply_is_given_to_the_call_that_is_sent_again() -> None:
    reply = payload(id=OLD_ID, result={"result": {"content": []}})
    stale = payload(id=OLD_ID + 1, result={})
    logged: list[Any] = []
    async with reattached(reply, stale, unanswered=(OLD_ID,)) as (driver, peer):
        await until(lambda: peer.connection.responses.keys() == {OLD_ID})
        await anyio.wait_all_tasks_blocked()

        def on_outcome(value: Reply | DecathlonError | None) -> None:
            assert OLD_ID in peer.connection.responses
            logged.append(value)

        await driver.send(call(driver, on_outcome))
        assert [type(value) for value in logged] == [Reply]
        await until(lambda: not peer.connection.responses)


async def test_replies_that_nobody_waits_for_are_not_kept() -> None:
    replies = [payload(id=OLD_ID + number, result={}) for number in range(3)]
    async with reattached(*replies) as (_, peer):
        await until(lambda: peer.connection.attachments and not peer.connection.responses)


async def test_call_without_a_kept_reply_is_sent_again_under_its_id() -> None:
    outcomes: list[Any] = []
    async with reattached(unanswered=(OLD_ID,)) as (driver, peer):
        await driver.send(call(driver, outcomes.append))
        request = await peer.receive()
        assert (request["id"], request["method"]) == (OLD_ID, "call")
        await peer.reply(request, {"result": {"content": []}})
        await until(lambda: bool(outcomes))
        assert isinstance(outcomes[0], Reply)


@pytest.mark.parametrize("is_sent", [True, False], ids=["the reply is held", "nothing has come"])
async def test_call_that_is_cancelled_instead_of_sent_again_holds_no_reply(is_sent: bool) -> None:
    reply, outcomes = payload(id=OLD_ID, result={"result": {"content": []}}), list[Any]()
    async with reattached(*[reply] * is_sent, unanswered=(OLD_ID,)) as (driver, peer):
        await until(driver._link.ready_or_closed.is_set)  # pyright: ignore[reportPrivateUsage]
        driver.cancel(OLD_ID)
        if not is_sent:
            # It may still run.
            assert (await peer.receive())["params"] == {"id": OLD_ID}
            await peer.send_payloads(reply)
        await until(lambda: not peer.connection.responses)
        assert outcomes == []


async def test_call_that_cannot_be_sent_again_holds_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reattached(payload(id=OLD_ID, result={}), unanswered=(OLD_ID,)) as (driver, peer):
        monkeypatch.setattr(wire, "MAX_LINE_BYTES", 10)
        with pytest.raises(LimitExceededError):
            await driver.send(call(driver, ignore))
        await until(lambda: not peer.connection.responses)


async def test_server_that_was_replaced_loses_the_driver() -> None:
    async with surviving() as (link, source, _):
        peer = source.peer
        client, driver = stream_pair()
        async with background_tasks() as tasks:
            next_server = DriverLink(Source(client), describe_loss, survival=Survival(60, 2), reattached=True)
            next_server.stream.attach()
            tasks.start_soon(next_server.run)
            peer.connection.receive(await driver.receive())
        assert peer.connection.generation == 2
        await peer.send_bytes(b"damaged\n")
        await link.closed.wait()
        error = await link.closed_error()
        assert error.message == "it says that another server process has taken it over"
        assert error.data["by_driver"]  # only one server can have the state folder
        await client.aclose()
        await driver.aclose()
