"""Replies that are fetched again after a connection or a server was lost."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp_types import JSONRPCNotification

from decathlon_mcp.background import background_tasks
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.protocol import resumption, sessions
from decathlon_mcp.protocol.resumption import SessionStreams
from tests.episodes.environment import TOOLS
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.restarting import RawSession, Restartable, answer_of, events_of, restartable

pytestmark = pytest.mark.anyio

TASK = "find-answer"


@pytest.fixture
async def http() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=30) as http:
        yield http


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ids of the requests that were dispatched, of all servers."""
    ids: list[Any] = []
    opened = SessionStreams.open

    def counted(self: SessionStreams, request_id: Any, *arguments: Any, **options: Any) -> Any:
        stream = opened(self, request_id, *arguments, **options)
        if stream is not None:
            ids.append(request_id)
        return stream

    monkeypatch.setattr(SessionStreams, "open", counted)
    return ids


class Gate:
    """A tool that counts its calls and returns once the gate is open."""

    def __init__(self) -> None:
        self.calls = 0
        self.open = anyio.Event()

    async def __call__(self, call: FakeCall) -> str:
        self.calls += 1
        await self.open.wait()
        return str(call.arguments.get("text", "through"))

    def provider(self) -> FakeProvider:
        return FakeProvider(tools={"probe": {**TOOLS["probe"], "hang": self}})


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110  (any change of state, not one event)
            await anyio.sleep(0.01)


def text_of(response: Any) -> str:
    return answer_of(response)["result"]["content"][0]["text"]


async def ready_session(http: httpx2.AsyncClient, server: Restartable, **options: Any) -> RawSession:
    """A session at a task's address whose episode is ready."""
    session = await RawSession.open(http, server.served.task(TASK), **options)
    await session.ask("tools/list", request_id=1)
    return session


async def broken_call(session: RawSession, gate: Gate, **options: Any) -> str:
    """Call the gate and break the connection off; returns the id of the first event."""
    count = gate.calls
    async with session.calling("probe__hang", **options) as (_, lines):
        await until(lambda: gate.calls > count)
    return lines[0].removeprefix("id: ")


async def test_first_event_has_an_id_and_no_data_and_comes_before_the_call(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        async with session.calling("probe__hang", request_id=5) as (coming, lines):
            assert lines == [f"id: {server.store.generation}.0.5", "data: "]
            # Requests are marked as answered about a second later.
            rows = {row.request: row.answered for row in server.store.requests(session.id)}
            assert rows["5"] is False
            gate.open.set()
            rest = [line async for line in coming if line]
        assert rest[0] == f"id: {server.store.generation}.last.5"


@pytest.mark.parametrize("request_id", [7, 0, -1, "seven", "ü\n%2.x", "last"])
async def test_reply_can_be_fetched_again_and_again(
    tmp_path: Path, http: httpx2.AsyncClient, request_id: Any
) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        event_id = await broken_call(session, gate, request_id=request_id)
        gate.open.set()
        for _ in range(2):
            answer = answer_of(await session.resume(event_id))
            assert answer["id"] == request_id
            assert answer["result"]["content"][0]["text"] == "through"
        assert gate.calls == 1


async def test_client_that_comes_back_early_waits_for_the_reply(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        event_id = await broken_call(session, gate)
        replies: list[str] = []

        async def resume() -> None:
            replies.append(text_of(await session.resume(event_id)))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(resume)
            await anyio.sleep(0.5)
            assert replies == []
            gate.open.set()
        assert replies == ["through"] * 3


async def test_after_the_event_of_the_answer_there_is_nothing(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server)
        params = {"name": "probe__echo", "arguments": {"text": "x"}}
        events = events_of(await session.post("tools/call", params))
        response = await session.resume(events[-1]["id"])
        assert (response.status_code, response.text) == (200, "")


async def test_reply_that_is_not_kept_any_more_is_an_error_under_its_id(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server)
        answer = answer_of(await session.resume(f"{server.store.generation}.0.%22old%22"))
        assert answer["id"] == "old"
        assert "not kept" in answer["error"]["message"]


async def test_call_in_flight_at_a_restart_is_dispatched_again_and_answered(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        event_id = await broken_call(session, gate, text="again")
        await server.restart(leaving_calls=True)
        gate.open.set()
        for _ in range(2):
            assert text_of(await session.resume(event_id)) == "again"
        assert gate.calls == 1


async def test_stored_call_is_dispatched_when_the_session_is_revived_for_another_reason(
    tmp_path: Path, http: httpx2.AsyncClient, dispatched: list[Any]
) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        event_id = await broken_call(session, gate)
        await server.restart(leaving_calls=True)
        assert await session.call("probe__echo", request_id=8, text="x") == "x"
        await until(lambda: dispatched.count(7) == 2)
        gate.open.set()
        assert text_of(await session.resume(event_id)) == "through"


async def test_answered_request_is_dispatched_again_only_for_a_client_that_names_it(
    tmp_path: Path, http: httpx2.AsyncClient, dispatched: list[Any]
) -> None:
    gate = Gate()
    gate.open.set()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        first = events_of(
            await session.post("tools/call", {"name": "probe__hang", "arguments": {}}, request_id=2)
        )
        await until(lambda: all(row.answered for row in server.store.requests(session.id)))
        await server.restart(leaving_calls=True)
        await session.ask("tools/list", request_id=3)
        assert dispatched == [1, 2, 3]
        assert text_of(await session.resume(first[0]["id"])) == "through"
        assert dispatched == [1, 2, 3, 2]
        assert gate.calls == 1


async def test_call_answered_just_before_its_server_died_is_dispatched_again_and_not_run_again(
    tmp_path: Path, http: httpx2.AsyncClient, dispatched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "EXPIRE_SECONDS", 60.0)
    gate = Gate()
    gate.open.set()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        await session.post("tools/call", {"name": "probe__hang", "arguments": {}}, request_id=2)
        await server.restart(leaving_calls=True)
        await session.ask("tools/list", request_id=3)
        await until(lambda: dispatched.count(2) == 2)
        assert gate.calls == 1


async def test_requests_are_deleted_soon_after_their_answers(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "ANSWERED_SECONDS", 0.1)
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server)
        for number in range(2, 5):
            await session.call("probe__echo", request_id=number, text="x")
        await until(lambda: not server.store.requests(session.id))


async def test_answer_that_no_client_fetches_is_forgotten(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "UNFETCHED_SECONDS", 0.1)
    monkeypatch.setattr(resumption, "ANSWERED_SECONDS", 0.1)
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        event_id = await broken_call(session, gate)
        gate.open.set()
        await until(lambda: not server.store.requests(session.id))
        assert "not kept" in answer_of(await session.resume(event_id))["error"]["message"]


async def test_answer_that_was_dropped_from_memory_is_made_again(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, dispatched: list[Any]
) -> None:
    monkeypatch.setattr(resumption, "MAX_KEPT_BYTES", 100)
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        events = [await broken_call(session, gate, request_id=number, text=str(number)) for number in (5, 6)]
        gate.open.set()
        await anyio.sleep(0.3)
        assert [text_of(await session.resume(event)) for event in events] == ["5", "6"]
        assert dispatched == [1, 5, 6, 5, 6], "each of the two takes the place of the other"
        assert gate.calls == 2


async def test_same_request_sent_twice_joins_the_first(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        replies: list[str] = []

        async def call() -> None:
            replies.append(await session.call("probe__hang", text="same"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: gate.calls == 1)
            tasks.start_soon(call)
            answer = await session.ask("tools/call", {"name": "probe__hang", "arguments": {"text": "other"}})
            assert "another request with this id" in answer["error"]["message"]
            assert answer["id"] == 7
            gate.open.set()
        assert replies == ["same", "same"]
        assert gate.calls == 1


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18"])
async def test_clients_of_earlier_revisions_get_json(
    tmp_path: Path, http: httpx2.AsyncClient, version: str
) -> None:
    """They cannot parse an event without data."""
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server, version=version)
        response = await session.post("tools/call", {"name": "probe__echo", "arguments": {"text": "x"}})
        assert response.headers["content-type"] == "application/json"
        assert server.store.requests(session.id) == []
        await server.restart()
        assert await session.call("probe__echo", request_id=9, text="after") == "after"


async def test_client_that_does_not_accept_events_gets_json(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server)
        session.headers["Accept"] = "application/json"
        response = await session.post("tools/call", {"name": "probe__echo", "arguments": {"text": "x"}})
        assert response.headers["content-type"] == "application/json"


async def test_too_many_requests_in_progress_are_served_as_without_a_store(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "MAX_STREAMS", 2)
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        events = [await broken_call(session, gate, request_id=number, text=str(number)) for number in (5, 6)]
        assert await session.call("probe__echo", request_id=7, text="x") == "x"
        gate.open.set()
        assert [text_of(await session.resume(event)) for event in events] == ["5", "6"]
        for number in range(10, 20):
            assert await session.call("probe__echo", request_id=number, text="x") == "x"
        assert len(server.store.requests(session.id)) <= 4


async def test_stored_requests_of_a_client_that_fetches_no_answer_are_bounded(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "MAX_STORED_BYTES", 300_000)
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        sessions = [await ready_session(http, server) for _ in range(2)]

        def stored() -> int:
            rows = [row for session in sessions for row in server.store.requests(session.id)]
            return sum(len(row.message) for row in rows)

        # Those in progress stay; further requests are served as without a store.
        events = [await broken_call(session, gate, text="x" * 100_000) for session in sessions]
        text = "y" * 150_000
        assert await sessions[0].call("probe__echo", request_id=50, text=text) == text
        assert 200_000 < stored() < 300_000
        gate.open.set()
        for event, session in zip(events, sessions, strict=True):
            assert len(text_of(await session.resume(event))) == 100_000
        # Answers that nobody has fetched are forgotten early.
        for number in range(100, 120):
            await broken_call(sessions[number % 2], gate, request_id=number, text="x" * 50_000)
            assert stored() < 300_000


async def test_progress_that_was_missed_is_sent_again(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    stream = resumption.RequestStream("session", "7", 3, lambda stream: None)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    for number in range(4):
        stream.add_notification(_notification(number))
    stream.add_answer(_answer())

    async def numbers(after: str) -> list[int]:
        sent.clear()
        await stream.send(receive, send, after=resumption.EventId.parse(after))
        data = [json.loads(message["body"].split(b"data: ")[1]) for message in sent if message["body"]]
        return [message.get("params", {}).get("progress", -1) for message in data]

    assert await numbers("3.0.7") == [0, 1, 2, 3, -1]
    assert await numbers("3.2.7") == [2, 3, -1]
    assert await numbers("2.2.7") == [0, 1, 2, 3, -1], "the numbers of an earlier server mean nothing"


def test_kept_notifications_are_bounded() -> None:
    stream = resumption.RequestStream("session", "7", 3, lambda stream: None)
    for number in range(3 * resumption.MAX_NOTIFICATIONS):
        stream.add_notification(_notification(number))
    assert stream.size_bytes < resumption.MAX_NOTIFICATIONS * 200
    for number in range(10):
        stream.add_notification(_notification(number, text="x" * (resumption.MAX_NOTIFICATION_BYTES // 3)))
    assert stream.size_bytes <= resumption.MAX_NOTIFICATION_BYTES


async def test_broken_start_episode_that_is_resumed_keeps_its_episode(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path, max_sandboxes=1, grace_seconds=0.5) as server:
        lobby = await RawSession.open(http, server.served.lobby)
        await lobby.ask("tools/call", {"name": "start_episode", "arguments": {"task": TASK}}, request_id=1)
        (first,) = server.registry.live
        event_id = await broken_start(lobby, server)
        episode = server.registry.live[-1]
        async with background_tasks() as tasks:
            tasks.start_soon(ends_later, first)
            answer = answer_of(await lobby.resume(event_id))
        assert answer["result"]["structuredContent"]["episode"] == episode.id
        await anyio.sleep(1)
        assert episode.state.phase is Phase.READY


async def ends_later(episode: Episode) -> None:
    await anyio.sleep(1.5)
    episode.close()


async def test_broken_start_episode_that_nobody_resumes_ends_its_episode_after_the_grace(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path, max_sandboxes=1, grace_seconds=0.5) as server:
        lobby = await RawSession.open(http, server.served.lobby)
        await lobby.ask("tools/call", {"name": "start_episode", "arguments": {"task": TASK}}, request_id=1)
        await broken_start(lobby, server)
        episode = server.registry.live[-1]
        with anyio.fail_after(20):
            await episode.state.reach(Phase.ENDED)
        assert episode.state.ending is Ending.CLIENT_LOST


async def broken_start(lobby: RawSession, server: Restartable) -> str:
    """Break off a `start_episode` that waits for a place; returns the id of its first event."""
    async with lobby.calling("start_episode", task=TASK) as (_, lines):
        await until(lambda: len(server.registry.live) == 2)
    return lines[0].removeprefix("id: ")


async def test_deleted_session_ends_its_streams(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        async with session.calling("probe__hang") as (coming, _):
            await until(lambda: gate.calls == 1)
            await http.delete(session.url, headers=session.headers)
            with anyio.fail_after(10):
                assert [line async for line in coming if line] == []


async def test_cancelled_call_is_answered_with_an_error(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server)
        event_id = await broken_call(session, gate)
        message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
        await http.post(session.url, json=message, headers=session.headers)
        assert answer_of(await session.resume(event_id))["error"]["code"] == -32800


def _notification(number: int, text: str = "") -> Any:
    params = {"progressToken": 1, "progress": number, "message": text}
    return JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params=params)


def _answer() -> bytes:
    return b'{"jsonrpc":"2.0","id":7,"result":{}}'
