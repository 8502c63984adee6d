"""Drivers that survive: streams that are cut, servers that are killed, and a server that never comes."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process
from decathlon_sandbox import wire

from decathlon_mcp.driver.client import Survival, boot_message, connect
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.driver.peer import (
    BOUND_SECONDS,
    FIRST_ID,
    SERVERS,
    DriverPeer,
    WireError,
    driver,
    processes_with,
    stdio_server,
    until,
)
from tests.driver.survivor import spec_of
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


@pytest.mark.parametrize("direction", ["to_driver", "to_server"])
def test_exchange_that_is_cut_at_every_byte_loses_and_doubles_nothing(direction: str, tmp_path: Path) -> None:
    with running_driver(tmp_path) as peer:
        peer.exchange()
        peer.exchange()
        total_bytes = peer.passed[direction]
        assert total_bytes > 100
        for after_bytes in range(1, total_bytes + 1):
            peer.exchange(direction, after_bytes)


# servers that are killed


class Lives:
    """Server processes that follow each other on one local sandbox with a tool server that counts calls."""

    def __init__(self, folder: Path) -> None:
        self.token = uuid.uuid4().hex
        self.owner = f"tests-survival-{self.token[:12]}"
        self.folder = folder / "sandboxes"
        self._log = folder / "log"
        program = [str(SERVERS / "counting.py"), str(folder / "runs")]
        self._arguments = {
            "owner": self.owner,
            "name": "survivor",
            "folder": str(self.folder),
            "log": str(self._log),
            "server": stdio_server("counting", sys.executable, "-S", *program, self.token),
        }
        self._runs = folder / "runs"

    async def start(self, generation: int, **arguments: Any) -> Process:
        values = {**self._arguments, "generation": generation, **arguments}
        return await anyio.open_process(
            [sys.executable, "-m", "tests.driver.survivor", json.dumps(values)], stdout=None, stderr=None
        )

    def log(self) -> list[dict[str, Any]]:
        lines = self._log.read_bytes().splitlines() if self._log.exists() else []
        return [json.loads(line) for line in lines]

    def runs(self) -> list[str]:
        """The calls that the tool server got."""
        return self._runs.read_text().split() if self._runs.exists() else []

    def texts(self) -> list[str]:
        """The logged outcomes of all calls."""
        return [
            entry["error"] if "error" in entry else entry["reply"]["result"]["content"][0]["text"]
            for entry in self.log()
            if "error" in entry or "reply" in entry
        ]


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncGenerator[Lives]:
    lives = Lives(tmp_path)
    yield lives
    async with HostProvider("tests-survival-end", lives.folder, isolation="none") as provider:
        await provider.sweep(lives.owner)
    assert processes_with(lives.token) == []


async def run_second(lives: Lives, **arguments: Any) -> None:
    (sent,) = [entry["call"] for entry in lives.log() if "call" in entry]
    async with await lives.start(2, call=sent, **{"unanswered": [sent], **arguments}) as server:
        with anyio.fail_after(BOUND_SECONDS):
            assert await server.wait() == 0


async def test_running_call_of_a_killed_server_is_answered_to_the_next_one(lives: Lives) -> None:
    async with await lives.start(1, tool="slow") as server:
        await until(lambda: lives.runs() == ["slow"])
        server.kill()
        await server.wait()
    await run_second(lives, tool="slow")
    assert lives.runs() == ["slow", "count"]
    assert lives.texts() == ["slow 1", "count 2"]


async def test_reply_that_was_not_logged_is_kept_for_the_next_server(lives: Lives) -> None:
    async with await lives.start(1, tool="count", kill_at="reply") as server:
        await server.wait()
    await run_second(lives, tool="count")
    assert lives.runs() == ["count", "count"]
    assert lives.texts() == ["count 1", "count 2"]


async def test_logged_call_that_is_sent_again_does_not_run_again(lives: Lives) -> None:
    """Also if the driver has not got the acknowledgement; nobody needs the reply then."""
    async with await lives.start(1, tool="count", kill_at="logged") as server:
        await server.wait()
    await run_second(lives, tool="count", unanswered=[])
    assert lives.runs() == ["count", "count"]
    first, again, last = lives.texts()
    assert (first, last) == ("count 1", "count 2")
    assert "was answered before" in again


async def test_driver_ends_with_all_its_processes_when_no_server_comes(lives: Lives) -> None:
    async with await lives.start(1, tool="slow", survive_seconds=2) as server:
        await until(lambda: lives.runs() == ["slow"])
        assert processes_with(lives.token)
        server.kill()
        await server.wait()
    killed_at = time.monotonic()
    await until(lambda: processes_with(lives.token) == [])
    assert time.monotonic() - killed_at < 20


# tunnels


async def test_new_server_resets_tunnels_and_keeps_forwarded_ports(tmp_path: Path) -> None:
    owner, opened = f"tests-survival-{uuid.uuid4().hex[:12]}", anyio.Event()

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
            provider.open(spec_of("tunnels")) as sandbox,
        ):
            async with connect(sandbox, survival=Survival(60, 1)) as client:
                await client.forward({port: dial})
                old = await anyio.connect_tcp("127.0.0.1", port)
                await old.send(b"a")
                assert await old.receive() == b"a"
            await sandbox.reopen()
            async with connect(sandbox, survival=Survival(60, 2), reattached=True) as client:
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
    return await peer.begin(
        wire.CALL,
        server="scripted",
        method="tools/call",
        params={"name": tool, "arguments": {"unit": "x", "times": 3}},
        timeout_seconds=60,
        max_bytes=60 * MIB,
    )


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
