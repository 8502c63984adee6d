"""Requests and notifications, with a scripted peer as the driver."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from decathlon_sandbox import wire

from decathlon_mcp.driver_client import messages as messages_module
from decathlon_mcp.driver_client import rpc as rpc_module
from decathlon_mcp.driver_client.messages import Loss, MessageStream
from decathlon_mcp.driver_client.rpc import MAX_NOTIFICATIONS_BYTES, RpcClient, read_message
from decathlon_mcp.errors import CallTimeoutError, DriverError, LimitExceededError, SandboxLostError
from decathlon_mcp.types import JsonObject
from tests.driver_client.support import FIRST_ID, Peer, Source, connection, payload

pytestmark = pytest.mark.anyio

MANY: list[Any] = [0] * 2000
TOO_MANY = "the driver sent an invalid reply to ping: the JSON text has more than 1,000 values and keys"
TOO_DEEP = "the driver sent an invalid reply to ping: the JSON text is nested deeper than 128 levels"


async def describe_loss(loss: Loss) -> SandboxLostError:
    return SandboxLostError(loss.reason or "the stream ended", by_driver=loss.by_driver)


@asynccontextmanager
async def rpc_client(**options: Any) -> AsyncGenerator[tuple[RpcClient, Peer]]:
    """A client that reads, and its peer."""
    async with connection() as (stream, peer), anyio.create_task_group() as tasks:
        rpc = RpcClient(MessageStream(Source(stream), **options), describe_loss)
        tasks.start_soon(rpc.read)
        rpc.attach()
        yield rpc, peer
        tasks.cancel_scope.cancel()


class Request:
    """A request that runs in a task; `outcome` is its result or error once `done` is set."""

    def __init__(self, tasks: TaskGroup, rpc: RpcClient, method: str = wire.PING, **options: Any):
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.outcome: Any = None
        tasks.start_soon(self._run, rpc, method, options)

    async def _run(self, rpc: RpcClient, method: str, options: dict[str, Any]) -> None:
        with self.scope:
            try:
                self.outcome = await rpc.request(method, {}, **options)
            except Exception as error:  # noqa: BLE001
                self.outcome = error
        self.done.set()

    async def result(self) -> Any:
        await self.done.wait()
        return self.outcome


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"garbage",
        b"[1]",
        b"7",
        b"null",
        b'{"id":NaN}',
        b'{"a":',
        b"\xff\xfe",
        b"[" * 900,
        b'{"id":' + b"[" * 100_000,
        b'{"method":[]}',
        b'{"method":7}',
        b'{"a":1}{"a":2}',
    ],
)
def test_payload_that_is_no_message_is_not_read(garbage: bytes) -> None:
    assert read_message(garbage) is None


# Requests and replies


async def test_replies_are_matched_to_requests_by_id() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        requests = [Request(tasks, rpc) for _ in range(3)]
        received = [await peer.receive() for _ in requests]
        assert len({message["id"] for message in received}) == 3
        assert received[0] == {"jsonrpc": "2.0", "id": received[0]["id"], "method": "ping", "params": {}}
        for message in reversed(received):
            await peer.reply(message, {"to": message["id"]})
        results = [await request.result() for request in requests]
        assert sorted(result["to"] for result in results) == sorted(message["id"] for message in received)
        assert results == [{"to": message["id"]} for message in received]


async def test_replies_with_an_unknown_id_are_ignored() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        number = (await peer.receive())["id"]
        assert number == FIRST_ID
        for wrong in (2, 0, -1, "1", None, [1], 1.0, 1.5, True, 10**30, {"id": 1}):
            await peer.send(id=wrong, result="wrong")
        await peer.send(id=number, result="right")
        assert await request.result() == "right"


async def test_second_reply_to_a_request_is_ignored() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        number = (await peer.receive())["id"]
        await peer.send_payloads(payload(id=number, result=1), payload(id=number, result=2))
        assert await request.result() == 1


async def test_error_without_an_id_fails_every_pending_request() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        requests = [Request(tasks, rpc) for _ in range(2)]
        for _ in requests:
            await peer.receive()
        await peer.send(id=None, error={"code": wire.PARSE, "message": "what?"})
        for request in requests:
            error = await request.result()
            assert isinstance(error, DriverError)
            assert (error.message, error.data) == ("what?", {"reason": "parse_error"})


@pytest.mark.parametrize("rest", [b'"result":' + b"[" * 100_000, b'"result":NaN}', b'"method":7}', b""])
async def test_reply_that_cannot_be_read_fails_its_request(rest: bytes) -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request, other = Request(tasks, rpc), Request(tasks, rpc)
        number, other_number = (await peer.receive())["id"], (await peer.receive())["id"]
        await peer.send_payloads(b'{"jsonrpc":"2.0","id":%d,%b' % (number, rest))
        error = await request.result()
        assert isinstance(error, DriverError)
        assert error.data == {"reason": "invalid_reply"}
        await peer.send(id=other_number, result="fine")
        assert await other.result() == "fine"


async def test_millions_of_unknown_ids_are_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "READ_BYTES_BURST", 100 * messages_module.LINE_COST_BYTES)
    monkeypatch.setattr(messages_module, "READ_BYTES_PER_SECOND", 1000 * messages_module.LINE_COST_BYTES)
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        number = (await peer.receive())["id"]
        started = anyio.current_time()
        await peer.send_payloads(*[b'{"id":77,"result":0}'] * 300, payload(id=number, result="done"))
        assert await request.result() == "done"
        later = Request(tasks, rpc)
        await peer.reply(await peer.receive(), "later")
        assert await later.result() == "later"
        assert anyio.current_time() - started >= 0.2


async def test_late_reply_does_not_match_a_newer_request() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        first = Request(tasks, rpc)
        old = await peer.receive()
        first.scope.cancel()
        assert (await peer.receive())["method"] == wire.CANCEL
        second = Request(tasks, rpc)
        new = await peer.receive()
        await peer.reply(old, "late")
        await peer.reply(new, "new")
        assert await second.result() == "new"


NESTED: list[JsonObject] = [{}] * 2000


@pytest.mark.parametrize(
    ("reply", "reason", "message"),
    [
        ({"error": {"code": wire.FILES, "message": "no such file"}}, "files", "no such file"),
        ({"error": {"code": wire.FROZEN, "message": "frozen"}}, "frozen", "frozen"),
        ({"error": {"code": 4711, "message": "?"}}, "driver_fault", "?"),
        ({"error": {"code": "at_capacity", "message": "?"}}, "driver_fault", "?"),
        ({"error": {"code": wire.SPAWN}}, "spawn", "spawn"),
        ({"error": {"code": wire.SPAWN, "message": "x" * 5000}}, "spawn", "x" * 4000),
        ({"error": {"code": wire.SPAWN, "message": ["no text"]}}, "spawn", "spawn"),
        ({"error": "text"}, "driver_fault", "driver_fault"),
        ({}, "invalid_reply", "the driver sent a reply that cannot be read"),
        ({"result": 1, "error": {"code": wire.FILES, "message": "both"}}, "files", "both"),
        ({"error": {"code": True, "message": "code 1?"}}, "driver_fault", "code 1?"),
        ({"error": {"code": 1.0, "message": "code 1?"}}, "driver_fault", "code 1?"),
        ({"error": {"code": wire.FILES, "message": "x" * (1 << 18)}}, "driver_fault", "driver_fault"),
        ({"error": NESTED}, "driver_fault", "driver_fault"),
        ({"result": NESTED}, "invalid_reply", TOO_MANY),
        ({"result": json.loads("[" * 200 + "]" * 200)}, "invalid_reply", TOO_DEEP),
    ],
)
async def test_error_reply_is_a_driver_error(reply: JsonObject, reason: str, message: str) -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        await peer.send(id=(await peer.receive())["id"], **reply)
        error = await request.result()
        assert isinstance(error, DriverError)
        assert (error.message, error.data) == (message, {"reason": reason})


async def test_data_of_an_error_reply_is_kept() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        data = {"server": "files", "stderr": "no module"}
        error = {"code": wire.SERVER, "message": "ended", "data": data}
        await peer.send(id=(await peer.receive())["id"], error=error)
        outcome = await request.result()
        assert isinstance(outcome, DriverError)
        assert outcome.data == {"reason": "server", "about": data}


async def test_timeout_reported_by_the_driver_is_a_call_timeout() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        await peer.send(id=(await peer.receive())["id"], error={"code": wire.TIMEOUT, "message": "late"})
        error = await request.result()
        assert isinstance(error, CallTimeoutError)
        assert error.message == "late"


# Cancellation and time-outs


async def test_cancelled_request_is_cancelled_in_the_driver() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        number = (await peer.receive())["id"]
        request.scope.cancel()
        assert await peer.receive() == {"jsonrpc": "2.0", "method": "cancel", "params": {"id": number}}
        await request.done.wait()


async def test_request_without_a_reply_in_time_is_cancelled_in_the_driver() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc, timeout_seconds=0.01)
        number = (await peer.receive())["id"]
        assert await peer.receive() == {"jsonrpc": "2.0", "method": "cancel", "params": {"id": number}}
        error = await request.result()
        assert isinstance(error, CallTimeoutError)
        assert (error.message, error.data) == ("no answer to ping within 0.01 s", {"seconds": 0.01})


@pytest.mark.parametrize("reply", [{"result": 1}, {"error": {"code": wire.FILES, "message": "no"}}])
async def test_request_with_a_reply_is_not_cancelled(reply: JsonObject) -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        first = Request(tasks, rpc)
        await peer.send(id=(await peer.receive())["id"], **reply)
        await first.result()
        Request(tasks, rpc)
        assert (await peer.receive())["method"] == wire.PING
        tasks.cancel_scope.cancel()


async def test_failing_handler_fails_its_request_and_cancels_it() -> None:
    async def fail(params: JsonObject) -> None:
        raise RuntimeError("no")

    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc, handlers={wire.MESSAGE: fail})
        number = (await peer.receive())["id"]
        await peer.send(method=wire.MESSAGE, params={"id": number, "params": {}})
        assert await peer.receive() == {"jsonrpc": "2.0", "method": "cancel", "params": {"id": number}}
        assert isinstance(await request.result(), RuntimeError)


# Notifications


async def test_notifications_are_delivered_in_order_before_the_reply() -> None:
    received: list[Any] = []

    async def handle(params: JsonObject) -> None:
        await checkpoint()
        received.append(params["n"])

    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc, handlers={wire.PROGRESS: handle, wire.MESSAGE: handle})
        number = (await peer.receive())["id"]
        methods = [wire.PROGRESS, wire.MESSAGE, wire.MESSAGE, wire.PROGRESS]
        data = [
            payload(method=name, params={"id": number, "params": {"n": n}}) for n, name in enumerate(methods)
        ]
        await peer.send_payloads(*data, payload(id=number, result="done"))
        assert await request.result() == "done"
        assert received == [0, 1, 2, 3]


async def test_notifications_reach_the_request_with_their_id_alone() -> None:
    received: list[str] = []

    def handler(name: str) -> Any:
        async def handle(params: JsonObject) -> None:
            received.append(f"{name}:{params['text']}")

        return {wire.MESSAGE: handle, wire.PROGRESS: None}

    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        first = Request(tasks, rpc, handlers=handler("first"))
        first_request = await peer.receive()
        second = Request(tasks, rpc, handlers=handler("second"))
        second_request = await peer.receive()
        unrelated: list[JsonObject] = [
            {"id": 99, "params": {"text": "unknown id"}},
            {"id": None, "params": {"text": "no id"}},
            {"id": str(first_request["id"]), "params": {"text": "id as text"}},
            {"id": float(first_request["id"]), "params": {"text": "id as a float"}},
            {"id": True, "params": {"text": "id as a bool"}},
            {"id": first_request["id"], "params": "no object"},
            {"params": {"text": "id is missing"}},
        ]
        for params in unrelated:
            await peer.send(method=wire.MESSAGE, params=params)
        await peer.send(method=wire.MESSAGE, params="no object")
        await peer.send(method="unknown", params={"id": first_request["id"], "params": {"text": "unknown"}})
        await peer.send(method=wire.PROGRESS, params={"id": first_request["id"], "params": {"text": "none"}})
        for request, text in ((second_request, "b"), (first_request, "a")):
            await peer.send(method=wire.MESSAGE, params={"id": request["id"], "params": {"text": text}})
            await peer.reply(request, {})
        await first.result()
        await second.result()
    assert sorted(received) == ["first:a", "second:b"]


async def test_notifications_above_the_rate_and_over_the_size_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[int] = []

    async def handle(params: JsonObject) -> None:
        received.append(params["n"])

    monkeypatch.setattr(rpc_module, "NOTIFICATIONS_BURST", 5)
    monkeypatch.setattr(rpc_module, "NOTIFICATIONS_PER_SECOND", 0.01)
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc, handlers={wire.MESSAGE: handle})
        number = (await peer.receive())["id"]
        too_long = {"n": -1, "text": "x" * wire.MAX_NOTIFICATION_BYTES}
        too_deep = {"n": -2, "deep": json.loads("[" * 200 + "]" * 200)}
        many = [{"n": n} for n in range(100)]
        for params in (too_long, too_deep, *many):
            await peer.send(method=wire.MESSAGE, params={"id": number, "params": params})
        await peer.send(id=number, result="done")
        assert await request.result() == "done"
    assert received == [0, 1, 2, 3]  # the deep one counts


async def slow_handler_sees(peer: Peer, rpc: RpcClient, numbers: range, text: str) -> list[int]:
    """The notifications that a handler sees if all of them come while it is busy with the first one."""
    seen: list[int] = []
    resume = anyio.Event()

    async def handle(params: JsonObject) -> None:
        seen.append(params["number"])
        await resume.wait()

    async with anyio.create_task_group() as tasks:
        request = Request(tasks, rpc, handlers={wire.MESSAGE: handle})
        number = (await peer.receive())["id"]
        for n in numbers:
            params = {"id": number, "params": {"number": n, "text": text}}
            await peer.send(method=wire.MESSAGE, params=params)
            if n == numbers[0]:
                await anyio.wait_all_tasks_blocked()
        await peer.send(id=number, result="done")
        await anyio.wait_all_tasks_blocked()
        resume.set()
        assert await request.result() == "done"
    return seen


async def test_notifications_for_a_slow_handler_are_bounded_in_bytes() -> None:
    async with rpc_client() as (rpc, peer):
        text = "x" * (MAX_NOTIFICATIONS_BYTES // 8)
        seen = await slow_handler_sees(peer, rpc, range(50), text)
    assert seen == [0, *range(43, 50)]


async def test_notifications_for_a_slow_handler_are_bounded_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_module, "MAX_NOTIFICATIONS", 5)
    async with rpc_client() as (rpc, peer):
        seen = await slow_handler_sees(peer, rpc, range(50), "")
    assert seen == [0, *range(45, 50)]


# The end of the connection


async def test_end_of_the_stream_fails_pending_and_later_requests() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        requests = [Request(tasks, rpc) for _ in range(2)]
        for _ in requests:
            await peer.receive()
        await peer.end()
        outcomes = [await request.result() for request in requests]
        assert [str(outcome) for outcome in outcomes] == ["the stream ended"] * 2
        assert all(isinstance(outcome, SandboxLostError) for outcome in outcomes)
        assert rpc.closed.is_set()
        assert rpc.ready_or_closed.is_set()
        with pytest.raises(SandboxLostError, match="the stream ended"):
            await rpc.request(wire.PING, {})
        with pytest.raises(SandboxLostError, match="the stream ended"):
            await rpc.notify(wire.CANCEL, {})


async def test_end_of_the_stream_within_a_reply_fails_the_request() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        peer.connection.send(payload(id=(await peer.receive())["id"], result={}))
        await peer.send_bytes(peer.connection.data_to_send()[:-1])
        await peer.end()
        assert isinstance(await request.result(), SandboxLostError)


async def test_reply_before_the_end_of_the_stream_is_returned() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        await peer.reply(await peer.receive(), "in time")
        await peer.end()
        assert await request.result() == "in time"


async def test_line_over_the_limit_closes_the_connection() -> None:
    async with rpc_client(max_read_bytes=1000) as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        await peer.receive()
        await peer.send_bytes(b"x" * 1100)
        error = await request.result()
        assert isinstance(error, SandboxLostError)
        assert error.message == "the driver violated the protocol: it sent a line of more than 1048 bytes"
        assert error.data["by_driver"]


async def test_stream_that_ends_is_not_the_drivers_fault() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        await peer.receive()
        await peer.end()
        error = await request.result()
        assert isinstance(error, SandboxLostError)
        assert not error.data["by_driver"]


async def test_garbage_does_not_close_the_connection() -> None:
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        request = Request(tasks, rpc)
        message = await peer.receive()
        await peer.send_payloads(
            b"garbage", b"\xff", b"[]", b'{"id":', b'{"method":7,"params":[]}', b'{"id":{},"method":[]}'
        )
        await peer.send_bytes(b"garbage\n\xff\n\n1 2 3\n")
        await peer.reply(message, "done")
        assert await request.result() == "done"


async def test_failing_write_is_a_lost_sandbox() -> None:
    async with connection() as (stream, peer):
        rpc = RpcClient(MessageStream(Source(stream)), describe_loss)
        await peer.aclose()
        with pytest.raises(SandboxLostError, match="the sandbox is gone"):
            await rpc.send_bytes(b"source")


async def test_message_over_the_limit_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 1000)
    async with rpc_client() as (rpc, peer), anyio.create_task_group() as tasks:
        with pytest.raises(LimitExceededError):
            await rpc.request(wire.PING, {"text": "x" * 1000})
        request = Request(tasks, rpc)
        await peer.reply(await peer.receive(), "done")
        assert await request.result() == "done"


async def test_first_reason_for_closing_is_kept() -> None:
    async with rpc_client() as (rpc, _):
        rpc.close("first")
        rpc.close("second")
        assert (await rpc.closed_error()).message == "first"


async def test_client_is_ready_once_the_driver_is_attached() -> None:
    async with connection(boots=True) as (stream, peer), anyio.create_task_group() as tasks:
        rpc = RpcClient(MessageStream(Source(stream)), describe_loss)
        tasks.start_soon(rpc.read)
        await rpc.send_bytes(b"1\n ")
        rpc.attach()
        await anyio.wait_all_tasks_blocked()
        assert not rpc.ready
        peer.start()
        await rpc.ready_or_closed.wait()
        assert rpc.ready
        assert not rpc.closed.is_set()
        tasks.cancel_scope.cancel()


async def test_end_of_the_stream_breaks_the_tunnels() -> None:
    async with rpc_client() as (rpc, peer):
        tunnel = rpc.tunnels.create()
        await peer.end()
        with pytest.raises(anyio.BrokenResourceError):
            await tunnel.receive()
        await tunnel.aclose()


async def test_servers_with_changed_tools_are_named_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_module, "MAX_SERVERS", 2)
    changed = rpc_module.ChangedServers()
    for params in (b"{", b"[]", b'{"server": 1}', b'{"server": "%b"}' % (b"x" * 2_000), b"[" * 1_000):
        changed.add(params)
    for name in ("one", "two", "one", "three"):
        changed.add(json.dumps({"server": name}).encode())
    with anyio.fail_after(5):
        assert await changed.take() == {"one", "two"}
    with anyio.move_on_after(0) as scope:
        await changed.take()
    assert scope.cancelled_caught
