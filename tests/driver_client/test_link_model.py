"""The link over streams that lose bytes, are cut at any time, and change their server.

`run_model` makes calls through the real `DriverLink` to the driver's own `Requests` and `Connection`, with a
wire between them that a seed breaks in every way: bytes are lost inside lines and between them, streams are
cut, calls are cancelled during a cut, requests are sent during an attachment, and three server processes
follow each other. Every call must run at most once, and each that was not cancelled gets its reply.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Backpressure
from decathlon_sandbox.driver_end import Connection

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver import stream as stream_module
from decathlon_mcp.driver.driver_messages import read_answer
from decathlon_mcp.driver.link import DriverLink
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.errors import ProviderUnavailableError

pytestmark = pytest.mark.anyio
BOUND_SECONDS = 300.0
"""For a busy machine; a thousand calls take half a second of processor time."""
SERVERS = 3
BATCH = 40
"""Calls in flight at the same time."""
FAULT = 0.02
"""Chance of a fault for each piece of bytes."""
TEXT_BYTES = (0, 10, 300, 20_000)


@dataclass
class Counts:
    """What happened in a run."""

    calls: int = 0
    cancelled: int = 0
    cuts: int = 0
    lost_pieces: int = 0
    attachments: int = 0
    servers: int = 0
    twice: list[int] = field(default_factory=list[int])
    """Ids of calls that ran more than once."""
    wrong: list[str] = field(default_factory=list[str])


class Loop:
    """The part of the driver's event loop that its connection uses; the wire calls the callbacks."""

    def __init__(self) -> None:
        self.reader: Any = None
        self.writer: Any = None

    def add_reader(self, fd: int, callback: Any) -> None:
        self.reader = callback

    def add_writer(self, fd: int, callback: Any) -> None:
        self.writer = callback

    def remove(self, fd: int) -> None: ...

    def stop(self) -> None:
        raise AssertionError("the driver has ended")

    def call_later(self, seconds: float, callback: Any) -> Any:
        class Timer:
            def cancel(self) -> None: ...

        return Timer()


class Sandbox:
    """A driver whose calls count themselves; some are answered later, out of order."""

    def __init__(self, chance: random.Random, counts: Counts) -> None:
        self._chance = chance
        self._counts = counts
        self.runs: dict[int, str] = {}
        self._unanswered: list[tuple[Any, str]] = []
        (self.server_out, driver_in), (self.server_in, driver_out) = socket.socketpair(), socket.socketpair()
        self._sockets = (driver_in, driver_out)
        for each in (self.server_in, self.server_out):
            each.setblocking(False)
        self._loop: Any = Loop()
        self._connection = Connection(
            self._loop,
            driver_in.fileno(),
            driver_out.fileno(),
            Backpressure(),
            begin=self._begin,
            on_notification=lambda method, params: None,
            on_attached=self._on_attached,
        )
        self._connection.start()

    def step(self) -> None:
        """Let the driver read, write, and answer some calls."""
        self._loop.reader()
        self._chance.shuffle(self._unanswered)
        for _ in range(self._chance.randrange(3)):
            if self._unanswered:
                request, text = self._unanswered.pop()
                request.reply({"text": text})
        if self._loop.writer is not None:
            self._loop.writer()

    def close(self) -> None:
        for each in (self.server_in, self.server_out, *self._sockets):
            each.close()

    def _begin(self, request: Any) -> None:
        text = request.params.get("text")
        if request.method == wire.PING:
            request.reply({})
            return
        if request.id in self.runs:
            self._counts.twice.append(request.id)
        self.runs[request.id] = text
        self._unanswered.append((request, text))

    def _on_attached(self) -> None:
        self._counts.attachments += 1


class Wire(ByteStream):
    """A stream to the sandbox, which loses bytes."""

    def __init__(self, sandbox: Sandbox, chance: random.Random, counts: Counts) -> None:
        self._sandbox = sandbox
        self._chance = chance
        self._counts = counts
        self._is_cut = False

    async def send(self, item: bytes) -> None:
        for piece in self._pieces(item):
            if self._is_cut:
                raise anyio.BrokenResourceError
            while piece:
                try:
                    piece = piece[self._sandbox.server_out.send(piece) :]
                except BlockingIOError:
                    self._sandbox.step()
            await self._step()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._is_cut:
            await self._step()
            try:
                data = self._sandbox.server_in.recv(self._chance.choice((50, 5000, max_bytes)))
            except BlockingIOError:
                continue
            if kept := b"".join(self._pieces(data)):
                return kept
        raise anyio.EndOfStream

    def _pieces(self, data: bytes) -> Iterable[bytes]:
        """The data in pieces, of which some are lost; the stream may be cut after any."""
        while data:
            size = self._chance.choice((10, 100, 10_000))
            piece, data = data[:size], data[size:]
            fault = self._chance.random()
            if fault < FAULT / 4:
                self._is_cut = True
                self._counts.cuts += 1
                return
            if fault < FAULT:
                self._counts.lost_pieces += 1
            else:
                yield piece

    async def _step(self) -> None:
        self._sandbox.step()
        await anyio.lowlevel.checkpoint()

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None:
        self._is_cut = True


class Source:
    """The sandbox, as the link sees it. It cannot always be opened again at once."""

    def __init__(self, sandbox: Sandbox, chance: random.Random, counts: Counts) -> None:
        self._parts = sandbox, chance, counts
        self._chance = chance
        self.stream: ByteStream = Wire(*self._parts)

    async def reopen(self) -> None:
        if self._chance.random() < 0.2:
            raise ProviderUnavailableError("no engine")
        self.stream = Wire(*self._parts)


class Server:
    """A server process: calls what is left of its predecessor's calls, and calls of its own."""

    def __init__(self, calls: int, chance: random.Random, counts: Counts) -> None:
        self._calls = calls
        self._chance = chance
        self._counts = counts
        self.unanswered: dict[int, str] = {}
        self._pings: list[int] = []

    async def run(self, link: DriverLink) -> None:
        """Make calls until so many have their outcomes; what is unanswered then is the next server's."""
        for request_id, text in tuple(self.unanswered.items()):
            self._send(link, request_id, text)
        target = self._counts.calls + self._calls
        while self._counts.calls < target:
            while len(self.unanswered) < BATCH:
                text = "x" * self._chance.choice(TEXT_BYTES)
                self._send(link, link.new_request_id(), f"{self._counts.calls}-{len(self.unanswered)}-{text}")
            if self._chance.random() < 0.002:
                cancelled = self._chance.choice([*self.unanswered])
                del self.unanswered[cancelled]
                self._counts.cancelled += 1
                link.cancel(cancelled)
            if not self._pings and self._chance.random() < 0.05:
                # What finds the loss of the last line: the heartbeat.
                self._pings.append(ping := link.new_request_id())
                link.send(ping, wire.PING, {}, lambda _: None, lambda _: self._pings.clear(), urgent=True)
            await anyio.lowlevel.checkpoint()

    def _send(self, link: DriverLink, request_id: int, text: str) -> None:
        def settle(outcome: Any) -> None:
            if outcome is None:
                return  # this server is at its end
            if request_id not in self.unanswered:
                self._counts.wrong.append(f"{request_id} has an outcome that nobody waits for")
            elif json.loads(bytes(getattr(outcome, "result", b"null"))) != {"text": text}:
                self._counts.wrong.append(f"{request_id}: {outcome!r:.200}")
            self.unanswered.pop(request_id, None)
            self._counts.calls += 1

        self.unanswered[request_id] = text
        link.send(request_id, wire.CALL, {"text": text}, read_answer, settle)


async def run_model(seed: int, calls: int) -> Counts:
    """Make so many calls by three servers. What a right link never does is in `twice` and `wrong`."""
    chance, counts = random.Random(seed), Counts()
    sandbox = Sandbox(chance, counts)
    unanswered: dict[int, str] = {}
    for generation in range(1, SERVERS + 1):
        counts.servers += 1
        server = Server(calls // SERVERS, chance, counts)
        server.unanswered = unanswered
        async with background_tasks() as tasks:
            link = DriverLink(
                cast("Any", Source(sandbox, chance, counts)),
                reconnect=ReconnectPolicy(3600, generation),
                reattached=generation > 1,
                unanswered=[*unanswered],
            )
            tasks.start_soon(link.receive)
            link.attach()
            await server.run(link)
            # A server that is killed has no time for more.
            unanswered = dict(server.unanswered)
            link.close()
    sandbox.close()
    return counts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach and open streams again without pauses."""
    monkeypatch.setattr(stream_module, "ATTACH_SECONDS", 0.0)
    monkeypatch.setattr(stream_module, "ANSWER_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(stream_module, "REOPEN_SECONDS", (0.0, 0.0))
    for name in ("READ_BYTES_PER_SECOND", "READ_BYTES_BURST"):
        monkeypatch.setattr(stream_module, name, 1 << 40)


@pytest.mark.parametrize(
    ("seed", "calls"),
    [
        (1, 500),
        # Answers to `attach` that come while the next one waits for its turn.
        pytest.param(303, 4_500, marks=pytest.mark.slow),
    ],
    ids=["few", "late answers"],
)
async def test_each_call_runs_once_and_has_its_reply(seed: int, calls: int) -> None:
    with anyio.fail_after(BOUND_SECONDS):
        counts = await run_model(seed, calls)
    assert counts.twice == []
    assert counts.wrong == []
    assert counts.servers == SERVERS
    assert counts.calls >= calls - SERVERS
    assert counts.cuts > calls / 100
    assert counts.lost_pieces > counts.cuts
    assert counts.cancelled > 0
