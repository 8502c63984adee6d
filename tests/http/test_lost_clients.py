"""Clients that are killed: what becomes of their episodes, and when."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.events import Spans
from decathlon_mcp.http.application import http_app
from decathlon_mcp.protocol.messages import BATCH_VERSION
from tests.driver.peer import until
from tests.episodes.environment import TOOLS, ended, running_registry
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, INITIALIZE, META, MODERN
from tests.probe.clients import connected
from tests.probe.serving import Served, serving_app

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Senders = Callable[[Served], "Sender"]
SOON: dict[str, Any] = {"grace_seconds": 0.3}
"""A grace that passes soon; the other limits take as long as by default."""


@pytest.fixture
def senders() -> Iterator[Senders]:
    """Makes raw connections, which are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda served: stack.enter_context(closing(Sender(served)))


@asynccontextmanager
async def served_by_fake(
    tmp_path: Path,
    provider: FakeProvider | None = None,
    *,
    spans: Spans | None = None,
    **settings: Any,
) -> AsyncGenerator[Served]:
    """Serve a registry over the fake provider."""
    provider = provider or FakeProvider(tools=TOOLS)
    async with running_registry(tmp_path, provider, **settings) as registry:
        registry.spans = spans
        registry.events.listeners = [] if spans is None else [spans]
        async with serving_app(http_app(registry), registry, tmp_path) as served:
            yield served


async def started(registry: EpisodeRegistry, count: int) -> Episode:
    """Wait until this many episodes live; returns the newest."""
    await until(lambda: len(registry.live) == count)
    return registry.live[-1]


async def reaches(episode: Episode, ending: Ending) -> None:
    with anyio.fail_after(30):
        await ended(episode)
    assert episode.state.ending is ending


@pytest.mark.parametrize(
    ("accept", "wait", "reset"),
    [
        ("application/json", True, False),
        ("application/json", False, True),
        ("application/json, text/event-stream", True, True),
        ("sessionless", True, True),
    ],
)
async def test_reply_of_start_episode_that_cannot_be_delivered_ends_the_episode(
    tmp_path: Path, accept: str, senders: Senders, *, wait: bool, reset: bool
) -> None:
    """The connection is gone before the server looks at the request, or while it waits."""
    async with served_by_fake(tmp_path, max_sandboxes=1) as served:
        async with connected(served.lobby) as lobby:
            await lobby.call_tool("start_episode", {"task": "find-answer"})
            arguments = {"name": "start_episode", "arguments": {"task": "find-answer", "wait": wait}}
            sender = senders(served)
            if accept == "sessionless":
                await sender.send(served.lobby, "tools/call", {**arguments, "_meta": META})
            else:
                session = await sender.initialize(served.lobby)
                await sender.send(served.lobby, "tools/call", arguments, session=session, accept=accept)
            if wait:
                await started(served.episodes, 2)
            sender.close(reset=reset)
            await anyio.sleep(0.2)  # if the request was never read, there is no event to wait for
            await until(lambda: len(served.episodes.live) == 1)


async def broken_batch(url: str, session: str, params: Any, begun: Callable[[], bool]) -> None:
    """Send a batch of one call, and break the connection off once the call has begun."""
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    async with httpx2.AsyncClient() as http, anyio.create_task_group() as tasks:
        headers = {**ACCEPT, "mcp-session-id": session}
        tasks.start_soon(partial(http.post, url, json=[message], headers=headers, timeout=60))
        await until(begun)
        tasks.cancel_scope.cancel()


async def test_batch_that_cannot_be_answered_ends_the_episode_that_it_started(
    tmp_path: Path, senders: Senders
) -> None:
    async with served_by_fake(tmp_path, max_sandboxes=1) as served:
        async with connected(served.lobby) as lobby:
            await lobby.call_tool("start_episode", {"task": "find-answer"})
            session = await senders(served).initialize(served.lobby, BATCH_VERSION)
            params = {"name": "start_episode", "arguments": {"task": "find-answer"}}
            await broken_batch(served.lobby, session, params, lambda: len(served.episodes.live) == 2)
            await until(lambda: len(served.episodes.live) == 1)


async def test_client_killed_during_a_batch_does_not_keep_its_sandbox(
    tmp_path: Path, senders: Senders
) -> None:
    async with served_by_fake(tmp_path, **SOON) as served:
        url = served.task("find-answer")
        session = await senders(served).initialize(url, BATCH_VERSION)
        stream = senders(served)
        await stream.send(url, None, session=session)
        episode = await started(served.episodes, 1)
        await broken_batch(url, session, {"name": "probe__hang"}, lambda: episode.calls.sent == 1)
        stream.close(reset=True)
        await reaches(episode, Ending.CLIENT_LOST)


async def test_request_broken_off_while_its_episode_is_queued_gives_up_its_place(
    tmp_path: Path, senders: Senders
) -> None:
    """Also at an episode's address: nobody can think about an episode that is not ready."""
    async with served_by_fake(tmp_path, max_sandboxes=1, **SOON) as served:
        async with connected(served.lobby) as lobby:
            await lobby.call_tool("start_episode", {"task": "find-answer"})
            reply: Any = await lobby.call_tool("start_episode", {"task": "find-answer", "wait": False})
            episode = served.find(reply.structured_content["episode"])
            sender, url = senders(served), served.episode(episode.id)
            session = await sender.initialize(url)
            await until(lambda: episode.lease.deadline < math.inf)
            await sender.send(url, "tools/list", {}, session=session)
            await until(lambda: episode.lease.deadline == math.inf)
            await anyio.sleep(0.5)
            assert episode.state.phase is Phase.QUEUED
            sender.close(reset=True)
            await reaches(episode, Ending.CLIENT_LOST)


async def test_at_an_episodes_address_a_lost_connection_means_nothing(
    tmp_path: Path, senders: Senders
) -> None:
    async with served_by_fake(tmp_path, **SOON) as served:
        async with connected(served.lobby) as lobby:
            reply: Any = await lobby.call_tool("start_episode", {"task": "find-answer"})
        episode = served.find(reply.structured_content["episode"])
        sender, url = senders(served), served.episode(episode.id)
        session = await sender.initialize(url)
        await sender.send(url, None, session=session)
        await until(lambda: episode.lease.deadline == math.inf or episode.lease.deadline > 10_000)
        sender.close(reset=True)
        await anyio.sleep(0.7)
        assert episode.state.phase is Phase.READY
        assert episode.lease.deadline > anyio.current_time() + 600


@pytest.mark.parametrize("progress", [True, False])
async def test_client_killed_during_a_call_does_not_keep_its_sandbox(
    tmp_path: Path, senders: Senders, *, progress: bool
) -> None:
    """Without progress the reply is one JSON body, for which the SDK waits however long the call takes."""
    async with served_by_fake(tmp_path, **SOON) as served:
        sender = senders(served)
        url = served.task("find-answer")
        session = await sender.initialize(url)
        stream = senders(served)
        await stream.send(url, None, session=session)
        meta = {"_meta": {"progressToken": 1}} if progress else {}
        await sender.send(url, "tools/call", {"name": "probe__hang", **meta}, session=session)
        episode = await started(served.episodes, 1)
        await until(lambda: episode.calls.sent == 1)
        await anyio.sleep(0.5)
        assert episode.state.phase is Phase.READY
        stream.close(reset=True)
        await anyio.sleep(0.5)
        assert episode.state.phase is Phase.READY, "a call in progress shows that the client is there"
        sender.close(reset=True)
        await reaches(episode, Ending.CLIENT_LOST)


async def test_client_that_opens_its_stream_again_or_calls_a_tool_keeps_its_sandbox(
    tmp_path: Path, senders: Senders
) -> None:
    async with served_by_fake(tmp_path, grace_seconds=1) as served:
        url = served.task("find-answer")
        sender = senders(served)
        session = await sender.initialize(url)
        episode = await started(served.episodes, 1)
        for again in ("stream", "call"):
            stream = senders(served)
            await stream.send(url, None, session=session)
            await until(lambda: episode.lease.deadline > anyio.current_time() + 10_000)
            stream.close(reset=False)
            await until(lambda: episode.lease.deadline < anyio.current_time() + 2)
            if again == "call":
                await sender.ask(url, "tools/list", {}, session=session)
                await until(lambda: anyio.current_time() + 600 < episode.lease.deadline < math.inf)
        assert episode.state.phase is Phase.READY


async def test_session_that_is_never_used_ends_after_the_first_use_limit(
    tmp_path: Path, senders: Senders
) -> None:
    async with served_by_fake(tmp_path, first_use_seconds=0.3) as served:
        sender = senders(served)
        session = await sender.initialize(served.task("find-answer"))
        await sender.ask(served.task("find-answer"), "notifications/initialized", {}, session=session)
        await reaches(await started(served.episodes, 1), Ending.NEVER_USED)


def message_of(method: str, params: Any, number: int | None) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    return json.dumps(message if number is None else {**message, "id": number}).encode()


class Sender:
    """A client on one raw TCP connection, which it can break off at any moment."""

    def __init__(self, served: Served) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._host = host

    async def initialize(self, url: str, version: str = INITIALIZE["params"]["protocolVersion"]) -> str:
        """Open a session and return its id."""
        head, _ = await self.ask(url, "initialize", {**INITIALIZE["params"], "protocolVersion": version})
        (session,) = [line[16:] for line in head.splitlines() if line.startswith("mcp-session-id: ")]
        return session

    async def send(
        self,
        url: str,
        method: str | None,
        params: Any = None,
        *,
        session: str | None = None,
        accept: str = "application/json, text/event-stream",
    ) -> None:
        """Send a POST or, without a method, a GET; does not wait for the response."""
        body = b"" if method is None else message_of(method, params, None if "notif" in method else 7)
        lines = [
            f"{'GET' if method is None else 'POST'} /{url.split('/', 3)[3]} HTTP/1.1",
            f"host: {self._host}",
            f"accept: {'text/event-stream' if method is None else accept}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([f"mcp-session-id: {session}"] if session else []),
            *([f"mcp-protocol-version: {MODERN}"] if params and "_meta" in params and not session else []),
            *([f"mcp-method: {method}", f"mcp-name: {params.get('name')}"] if params else []),
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    async def ask(self, url: str, method: str, params: Any, *, session: str | None = None) -> tuple[str, str]:
        """Send a POST and return the head and the body of the response."""
        await self.send(url, method, params, session=session)
        with anyio.fail_after(30):
            return await anyio.to_thread.run_sync(self._receive, abandon_on_cancel=True)

    def _receive(self) -> tuple[str, str]:
        received = b""
        while not _is_complete(received):
            received += self._socket.recv(65536)
        head, _, body = received.decode().partition("\r\n\r\n")
        return head, body

    def close(self, *, reset: bool = False) -> None:
        """Break the connection off, as the kernel does for a killed process (`reset`: with unread data)."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()


def _is_complete(response: bytes) -> bool:
    head, separator, body = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = next((int(line[15:]) for line in head.splitlines() if line.startswith(b"content-length:")), 0)
    return bool(separator) and len(body) >= length
