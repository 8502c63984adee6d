"""The driver's client with a scripted driver: booting, methods, lease and loss."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from decathlon_mcp.driver import client as driver_module
from decathlon_mcp.driver.client import (
    DriverClient,
    connect,
)
from decathlon_mcp.errors import DriverError, ImageError, SandboxLostError
from decathlon_mcp.sandboxes.base import ended_from_inside
from decathlon_mcp.types import JsonObject
from tests.driver_client.support import Peer, ScriptedSandbox, connection

pytestmark = pytest.mark.anyio

RUN_RESULT = {
    "exit_code": 3,
    "signal": None,
    "timed_out": False,
    "stdout": "out",
    "stderr": "err",
    "truncated": False,
    "channel": None,
    "seconds": 0.1,
}


@asynccontextmanager
async def booting(**fields: Any) -> AsyncGenerator[tuple[ScriptedSandbox, Peer]]:
    """A sandbox whose driver has not started; `fields` are those of the sandbox."""
    async with connection(boots=True) as (stream, peer):
        yield ScriptedSandbox(stream, **fields), peer


@asynccontextmanager
async def connected(**fields: Any) -> AsyncGenerator[tuple[DriverClient, Peer]]:
    """A client whose driver has started."""
    async with booting(**fields) as (sandbox, peer), connect(sandbox) as driver:
        peer.start()
        yield driver, peer


async def answered(peer: Peer, call: Awaitable[Any], result: Any) -> Any:
    """The result of a call whose request gets this result."""

    async def answer() -> None:
        await peer.reply(await peer.receive(), result)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        return await call


# Methods


RUN = partial(DriverClient.run, argv=["true"], cwd="/", timeout_seconds=5)
START = partial(DriverClient.start, names=["files"], deadline_seconds=5)
INVALID_RESULTS: list[tuple[Any, Any]] = [
    (RUN, {**RUN_RESULT, "stdout": 7}),
    (START, {"servers": {"files": {"tools": ["read"]}}}),
    (DriverClient.freeze, "logs"),
    (DriverClient.snapshot, None),
]


@pytest.mark.parametrize(("method", "result"), INVALID_RESULTS)
async def test_invalid_result_is_a_driver_error(method: Any, result: Any) -> None:
    async with connected() as (driver, peer):
        with pytest.RaisesGroup(pytest.RaisesExc(DriverError, match="invalid reply")):
            await answered(peer, method(driver), result)


async def test_tools_with_one_name_are_one() -> None:
    tools: list[JsonObject] = [
        {"name": "a", "inputSchema": {}},
        {"name": "b"},
        {"name": "a", "description": "the last"},
    ]
    async with connected() as (driver, peer):
        call = driver.start(["files"], deadline_seconds=5)
        started = await answered(peer, call, {"servers": {"files": {"tools": tools}}})
    assert started["files"].tools == [{"name": "a", "description": "the last"}, {"name": "b"}]


# Boot


async def ping_after_the_end(**fields: Any) -> None:
    """Ping a driver whose stream ends before it has started."""
    async with booting(**fields) as (sandbox, peer), connect(sandbox) as driver:
        await peer.end()
        await driver.ping()


@pytest.mark.parametrize(
    "complaint",
    [
        "decathlon: Python 3.10 or later is needed, this is 3.8.10",
        "decathlon: this Python lacks its standard library: No module named 'json'",
    ],
)
async def test_python_that_cannot_run_the_driver_is_an_image_error(complaint: str) -> None:
    with pytest.raises(ImageError) as caught:
        await ping_after_the_end(log_tail=f"a warning\n{complaint}\n")
    assert caught.value.message == f"an-image cannot run the driver: {complaint.removeprefix('decathlon: ')}"
    assert caught.value.data == {"image": "an-image"}


async def test_sandbox_that_ends_during_boot_is_lost_with_the_end_of_its_stderr() -> None:
    with pytest.raises(SandboxLostError) as caught:
        await ping_after_the_end(log_tail="Killed\n", cause="out of memory")
    assert caught.value.message == (
        "sandbox lost: the sandbox's first process ended (out of memory); its stderr ends with: Killed"
    )
    assert caught.value.data == {"cause": "out of memory", "booted": False}


async def test_driver_that_does_not_start_in_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "BOOT_SECONDS", 0.01)
    async with booting() as (sandbox, _):
        with pytest.raises(SandboxLostError, match="the driver did not come up within 0 s"):
            async with connect(sandbox) as driver:
                await driver.ping()


# Loss


async def test_loss_of_the_sandbox_has_its_cause() -> None:
    async with connected(cause="exit code 137") as (driver, peer):
        await peer.end()
        await driver.closed.wait()
        with pytest.raises(SandboxLostError) as caught:
            await driver.ping()
    assert caught.value.message == "sandbox lost: the sandbox's first process ended (exit code 137)"
    assert caught.value.data == {"cause": "exit code 137"}


async def test_lease_is_renewed_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LEASE_SECONDS", 0.3)
    async with connected() as (driver, peer):
        for _ in range(3):
            request = await peer.receive()
            assert request["method"] == "ping"
            await peer.reply(request, {})
        assert not driver.closed.is_set()


async def test_driver_that_does_not_answer_a_ping_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LEASE_SECONDS", 0.03)
    async with connected() as (driver, peer):
        assert (await peer.receive())["method"] == "ping"
        await driver.closed.wait()
        error = await driver.closed_error()
    assert error.message == "sandbox lost: the driver has not answered for 0 s"
    assert ended_from_inside(error)


async def test_driver_whose_stream_breaks_is_not_at_fault() -> None:
    async with connected() as (driver, peer):
        await peer.end()
        await driver.closed.wait()
        assert not ended_from_inside(await driver.closed_error())
