"""Drivers that survive: streams that are cut, another server, and a server that never comes."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import BOOT_COMMAND, Survival, boot_message, connect
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.driver.peer import (
    BOUND_SECONDS,
    FIRST_ID,
    DriverPeer,
    WireError,
    driver,
    until,
)
from tests.fakes.server_end import ServerEnd

pytestmark = pytest.mark.anyio
MIB = 1 << 20


# a stream that is cut


class CutPeer:
    """A server whose stream loses everything after some bytes, and is then opened again. Synchronous."""

    def __init__(self, process: subprocess.Popen[bytes], scratch: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input_fd, self._output_fd = process.stdin.fileno(), process.stdout.fileno()
        self._scratch = scratch
        self._end = ServerEnd(generation=1, survive_seconds=60)
        self._remaining: dict[str, float] = {}
        self._requests: dict[int, bytes] = {}
        """Those without a response."""
        self._next_id = FIRST_ID
        self.passed = {"to_driver": 0, "to_server": 0}
        process.stdin.write(boot_message())
        process.stdin.flush()
        self._end.attach(secrets.token_hex(16))
        while not self._end.attached:
            self._carry()

    def exchange(self, cut: str | None = None, after_bytes: int = 0) -> None:
        """Three requests; each must run once and have one response. The stream is cut once."""
        self._remaining = {} if cut is None else {cut: after_bytes}
        self.passed = dict.fromkeys(self.passed, 0)
        ids = range(self._next_id, self._next_id + 3)
        self._next_id += 3
        step = {"write": f"{self._scratch}/{ids[0]}", "text": "x" * 50}
        requests: list[tuple[str, dict[str, Any]]] = [
            (wire.ARRANGE, {"steps": [step]}),
            (wire.PING, {}),
            ("unknown", {"text": "y" * 50}),
        ]
        for request_id, (method, params) in zip(ids, requests, strict=True):
            message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
            self._requests[request_id] = json.dumps(message).encode()
            self._end.send(self._requests[request_id])
        responses: list[dict[str, Any]] = []
        deadline = time.monotonic() + BOUND_SECONDS
        while len(responses) < 3:
            assert time.monotonic() < deadline
            responses += self._carry()
            if any(remaining <= 0 for remaining in self._remaining.values()):
                self._remaining = {}
                self._end.stream_lost()
                self._attach()
        assert sorted(response["id"] for response in responses) == [*ids]
        assert sum("error" in response for response in responses) == 1
        self._end.done(*ids)

    def _attach(self) -> None:
        """Attach, and send again what the driver has never had."""
        self._end.attach(secrets.token_hex(16), self._requests)

    def _carry(self) -> list[dict[str, Any]]:
        """Carry bytes in both directions; returns the messages that arrive."""
        output = self._passing("to_driver", self._end.data_to_send())
        while output:
            output = output[os.write(self._input_fd, output) :]
        messages: list[dict[str, Any]] = []
        if select.select([self._output_fd], [], [], 0.01)[0]:
            data = os.read(self._output_fd, 65536)
            assert data, "the driver has ended"
            for payload in self._end.receive(self._passing("to_server", data)):
                message = json.loads(payload)
                # One that was sent before and after an attachment comes twice.
                if self._requests.pop(message["id"], None) is not None:
                    messages.append(message)
            for request_id in self._end.unknown or ():
                self._end.send(self._requests[request_id])
            self._end.unknown = None
        if self._end.damaged:
            self._end.damaged.clear()
            self._attach()
        return messages

    def _passing(self, direction: str, data: bytes) -> bytes:
        """The part of the data that arrives. When one direction is cut, the other one is too."""
        if any(remaining <= 0 for remaining in self._remaining.values()):
            return b""
        if direction in self._remaining:
            arriving = data[: int(self._remaining[direction])]
            self._remaining[direction] -= len(data)
        else:
            arriving = data
        self.passed[direction] += len(arriving)
        return arriving


@contextmanager
def running_driver(scratch: Path) -> Generator[CutPeer]:
    process = subprocess.Popen(
        [sys.executable, *wire.BOOT_COMMAND[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        try:
            yield CutPeer(process, scratch)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_driver", "to_server"])
def test_exchange_that_is_cut_at_every_byte_loses_and_doubles_nothing(direction: str, tmp_path: Path) -> None:
    with running_driver(tmp_path) as peer:
        peer.exchange()
        peer.exchange()
        total_bytes = peer.passed[direction]
        assert total_bytes > 100
        for after_bytes in range(1, total_bytes + 1):
            peer.exchange(direction, after_bytes)


# a server that never comes


async def test_driver_ends_with_all_its_processes_when_no_server_comes(python: str) -> None:
    async with driver(python, survive_seconds=1) as peer:
        await peer.start(peer.scripted_server("daemonic"), peer.scripted_server("stubborn", "stubborn"))
        ended_at = time.monotonic()
        assert await peer.close() == 0
        assert time.monotonic() - ended_at > 0.9
        assert peer.living() == []


# tunnels


async def test_new_server_resets_tunnels_and_keeps_forwarded_ports(tmp_path: Path) -> None:
    owner, opened = f"tests-survival-{uuid.uuid4().hex[:12]}", anyio.Event()
    spec = SandboxSpec("tunnels", BOOT_COMMAND, PurePosixPath("/episode"), survives=True)

    async def echo(stream: Any) -> None:
        async with stream:
            async for chunk in stream:
                opened.set()
                await stream.send(chunk)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, echo)
        target = listener.extra(anyio.abc.SocketAttribute.local_port)

        async def dial() -> Any:
            return await anyio.connect_tcp("127.0.0.1", target)

        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as unused:
            port = unused.extra(anyio.abc.SocketAttribute.local_port)
        async with (
            HostProvider(owner, tmp_path, isolation="none") as provider,
            provider.open(spec) as sandbox,
        ):
            async with connect(sandbox, survival=Survival(60, 1)) as client:
                await client.forward({port: dial})
                old = await anyio.connect_tcp("127.0.0.1", port)
                await old.send(b"a")
                assert await old.receive() == b"a"
            await sandbox.reopen()
            async with connect(sandbox, survival=Survival(60, 2), taken_back=True) as client:
                await client.forward({port: dial})
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await old.receive()
                async with await anyio.connect_tcp("127.0.0.1", port) as new:
                    await new.send(b"b")
                    assert await new.receive() == b"b"
            await old.aclose()
        tasks.cancel_scope.cancel()


# room for responses


async def begin_large(peer: DriverPeer, tool: str = "hang") -> int:
    """Begin a call whose reply may have 60 MiB. There is room for three of them."""
    return await peer.begin_tool("scripted", tool, max_bytes=60 * MIB, unit="x", times=3)


async def test_request_without_room_for_its_response_waits(python: str) -> None:
    async with driver(python) as peer:
        await peer.start(peer.scripted_server("plain"))
        running = [await begin_large(peer) for _ in range(3)]
        waiting, cancelled = await begin_large(peer, "text"), await begin_large(peer, "die")
        assert await peer.request(wire.PING) == {}
        await peer.cancel(cancelled)
        with pytest.raises(WireError) as error:
            await peer.result(cancelled)
        assert error.value.reason == "cancelled"
        assert waiting not in peer.lines
        await peer.cancel(running[0])
        reply = await peer.result(waiting)
        assert reply["result"]["content"][0]["text"] == "xxx"
        assert await peer.text("scripted", "text", unit="y", times=2) == "yy"


async def test_large_replies_that_are_not_acknowledged_pause_the_servers(python: str) -> None:
    async with driver(python) as peer:
        await peer.start(peer.scripted_server("plain"))
        peer.acknowledges = False
        replies = [await peer.begin_tool("scripted", "text", unit="x" * 1000, times=3000) for _ in range(10)]
        await until(lambda: sum(number in peer.lines for number in replies) >= 3)
        assert await peer.request(wire.PING) == {}
        await anyio.sleep(0.5)  # nothing more may come; there is no event for that
        assert sum(number in peer.lines for number in replies) == 3
        peer.acknowledges = True
        await peer.acknowledge_all()
        for number in replies:
            assert len((await peer.result(number))["result"]["content"][0]["text"]) == 3_000_000
