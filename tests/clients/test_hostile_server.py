"""What a server cannot do to its clients: fill their memory, or keep them busy."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count, islice
from typing import Any, cast

import pytest
from decathlon_client import AtCapacityError, ClientError, Decathlon, Episode, cluster, sdk
from decathlon_client.client_errors import RETRY_SECONDS
from decathlon_client.client_session import SessionOwner, error_from_response
from decathlon_client.client_values import JsonObject
from decathlon_client.cluster import ClusterEndpoint
from decathlon_client.resends import absent_seconds

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n%b\r\n"
PART = b"x" * (1 << 16)
EVENT = b": nothing\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "encoding", "beginning", "part"),
    [
        (b"application/json", b"", b"", b"[" * len(PART)),
        (b"text/event-stream", b"", b"data: ", PART),
        (b"text/event-stream", b"", EVENT * 1000 + b"data: ", PART),
        (b"application/json", b"Content-Encoding: gzip\r\n", gzip.compress(bytes(1 << 20)), b""),
    ],
    ids=["json", "event", "later event", "compressed"],
)
async def test_a_message_without_end_fails(
    monkeypatch: pytest.MonkeyPatch, kind: bytes, encoding: bytes, beginning: bytes, part: bytes
) -> None:
    monkeypatch.setattr(sdk, "MAX_MESSAGE_BYTES", 1 << 20)
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(0)
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD % (kind, encoding))
            writer.write(b"%x\r\n%b\r\n" % (len(beginning), beginning) if beginning else b"")
            for _ in count():
                writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
                await writer.drain()
                sent[-1] += len(part)
                if not part and not await reader.read(1 << 16):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ClientError):
            async with asyncio.timeout(30), Decathlon(f"http://127.0.0.1:{port}", resend_seconds=0):
                pass
    # With what buffers of the system take.
    assert max(sent) < 32 << 20


async def test_a_long_stream_of_events_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "MAX_MESSAGE_BYTES", 1000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        # In parts of any length, so that an end is in two of them.
        stream = EVENT * 2000
        for place in range(0, len(stream), 17):
            writer.write(stream[place : place + 17])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, sdk.http_client({}) as client:
        port = server.sockets[0].getsockname()[1]
        assert (await client.get(f"http://127.0.0.1:{port}/")).content == EVENT * 2000


@pytest.mark.parametrize("seconds", ["-1", "0", "1e-300", "NaN", "Infinity", "1" + "0" * 400, '"1"', "[1]"])
def test_a_full_server_is_asked_again_after_a_pause(seconds: str) -> None:
    data = f'{{"code": "at_capacity", "retryAfterSeconds": {seconds}}}'
    body = f'{{"error": {{"code": "full", "message": "full", "data": {data}}}}}'
    error = error_from_response(sdk.ErrorResponse(503, body.encode()))
    assert isinstance(error, AtCapacityError)
    assert error.retry_after_seconds == RETRY_SECONDS


@pytest.mark.parametrize("seconds", ["-1e308", "NaN", "Infinity", "1" + "0" * 400, '"1"', "[1]"])
def test_an_absence_that_is_no_time_has_no_request_sent_again(seconds: str) -> None:
    data = f'{{"code": "provider_unavailable", "absentSeconds": {seconds}}}'
    body = f'{{"error": {{"code": -32603, "message": "away", "data": {data}}}}}'
    assert absent_seconds(error_from_response(sdk.ErrorResponse(503, body.encode()))) is None


EPISODE: JsonObject = {"id": "e", "public_id": "p", "page": "http://page", "task": "t", "phase": "ready"}
VERDICT: JsonObject = {
    "reward": 1.0,
    "success": True,
    "status": "scored",
    "metrics": {"calls": 1},
    "suite": "s",
    "suite_revision": "r",
}
TOOL: JsonObject = {"name": "look", "description": "Looks.", "inputSchema": {"type": "object"}}
REPLIES: dict[str, JsonObject] = {
    "initialize": {"instructions": "Look.", "_meta": {"decathlon/episode": EPISODE}},
    "tools/list": {"tools": [TOOL]},
    "list_tasks": {
        "structuredContent": {
            "tasks": [
                {
                    "id": "t",
                    "suite": "s",
                    "splits": ["train"],
                    "servers": ["look"],
                    "local_tools": [],
                    "missing": [],
                    "prompt": "Look.",
                    "launch_time": "2026-01-01",
                    "pass_rate": 0.5,
                    "attempts": 2,
                    "metrics": ["seen"],
                }
            ]
        }
    },
    "list_tools": {"structuredContent": {"tools": [TOOL]}},
    "start_episode": {
        "structuredContent": {
            "episode": "e",
            "public_id": "p",
            "page": "http://page",
            "address": "http://here/episodes/e/mcp",
            "agent": "a",
            "agent_address": "http://here/episodes/a/mcp",
        }
    },
    "snapshot_episode": {"structuredContent": {"at": 1, "bytes": 5}},
    "episode_status": {"structuredContent": {"phase": "ended", "ending": "scored", "calls": 1}},
    "evaluate": {"structuredContent": VERDICT},
    "look": {
        "content": [{"type": "text", "text": "seen"}],
        "_meta": {"decathlon/error": {"code": "call_timeout", "retryAfterSeconds": 1}},
    },
    "claim_done": {"isError": False},
}
"""What a server answers to the handshake, to lists and to tools."""
DEEP: Any = json.loads("[" * 120 + "]" * 120)
ODD: list[Any] = [None, True, -1, 10**400, math.nan, math.inf, "x", "\ud800", [5], {"x": []}, DEEP]


def odd_replies(reply: Any) -> Generator[Any]:
    """The reply, and then each of its parts, missing or odd."""
    yield from ODD
    if not isinstance(reply, (dict, list)):
        return
    parts: Any = cast("Any", reply)
    for place in range(len(parts)) if isinstance(reply, list) else list(parts):
        for value in odd_replies(parts[place]):
            changed = parts.copy()
            changed[place] = value
            yield changed
        changed = parts.copy()
        del changed[place]
        yield changed


class OddServer:
    """A server in memory that gives these answers."""

    def __init__(self, replies: JsonObject) -> None:
        self.replies = replies

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        yield

    def address(self, episode: str | None) -> str:
        return episode or "lobby"

    @asynccontextmanager
    async def open_session(self, owner: SessionOwner, episode: str | None) -> AsyncGenerator[Any]:
        yield self

    async def initialize(self) -> JsonObject:
        return self.replies["initialize"]

    async def request(self, method: str, params: JsonObject, on_progress: object) -> JsonObject:
        return self.replies.get(params["name"] if method == "tools/call" else method, {})


async def use(client: Decathlon) -> None:
    """Use all of a client. Raises what it raises, unless this is a ClientError."""
    async with AsyncExitStack() as stack:
        with suppress(ClientError):
            await client.tasks()
        with suppress(ClientError):
            await client.tools("t")
        with suppress(ClientError):
            await client.snapshot("e")
        with suppress(ClientError):
            await client.rewards_along("e")
        with suppress(ClientError):
            batch = await stack.enter_async_context(
                client.batch(["t"], concurrency=1, tries=1, patience_seconds=0, progress=False)
            )
            async for result in batch.run(play):
                assert result.failure is None or isinstance(result.failure, ClientError), result.failure
            str(batch.summary)
        with suppress(ClientError):
            await play(await stack.enter_async_context(client.episode("t")))


async def play(episode: Episode) -> None:
    for act in (
        lambda: episode.call("look"),
        lambda: episode.act("look"),
        lambda: episode.note("Seen."),
        episode.claim_done,
        episode.truncate,
        episode.evaluate,
    ):
        with suppress(ClientError):
            await act()
    assert all(isinstance(text, str | None) for text in (episode.page, episode.agent_address, episode.task))


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", REPLIES)
async def test_no_odd_reply_makes_a_client_raise_anything_but_its_own_errors(place: str, step: int) -> None:
    # Each part gets another two or three of the odd values, since their number is no multiple of five.
    for odd in islice(odd_replies(REPLIES[place]), 0, None, step):
        if isinstance(odd, dict):  # the SDK refuses any other result
            async with Decathlon.at_endpoint(OddServer({**REPLIES, place: odd})) as client:
                try:
                    await use(client)
                except Exception as error:
                    error.add_note(f"{odd!r:.500}")
                    raise


@pytest.mark.parametrize(
    "answer",
    ['{"nodes": 5}', '{"nodes": {}, "episode": "e"}', "[]", '{"episode": "e", "address": [1]}', "no"],
)
async def test_no_odd_answer_of_a_cluster_raises_anything_but_the_clients_errors(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = sdk.httpx.MockTransport(lambda request: sdk.httpx.Response(200, text=answer))

    def http_client(headers: dict[str, str]) -> Any:
        return sdk.httpx.AsyncClient(transport=transport)

    monkeypatch.setattr(cluster, "http_client", http_client)
    endpoint, owner = ClusterEndpoint("http://cluster", ""), cast("Any", None)
    async with endpoint.run():
        with pytest.raises(ClientError):
            async with endpoint.open_session(owner, None):
                pass
        with pytest.raises(ClientError, match="the cluster broke off"):
            async with endpoint.hold({}).run():
                pass
