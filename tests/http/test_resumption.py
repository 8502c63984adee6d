"""Replies that are fetched again after a connection or a server was lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.episodes import calls
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.protocol.messages import EventId, Kind
from tests.driver.peer import until
from tests.episodes.environment import TOOLS
from tests.fakes.driver import FakeCall, FakeRun
from tests.fakes.provider import FakeProvider
from tests.http.messages import TASK, tokens_of
from tests.http.restarting import RawSession, answer_of, events_of, ready_session, restartable
from tests.storage.trajectories import events

pytestmark = pytest.mark.anyio


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


class SetUp:
    """The `run` of a fake provider: a set-up that goes on until `over` is set."""

    def __init__(self) -> None:
        self.begun, self.over = anyio.Event(), anyio.Event()

    async def __call__(self, request: FakeRun) -> int:
        self.begun.set()
        await self.over.wait()
        return 0


def text_of(response: Any) -> str:
    return answer_of(response)["result"]["content"][0]["text"]


async def broken_call(session: RawSession, gate: Gate, **options: Any) -> str:
    """Call the gate and break the connection off; returns the id of the first event."""
    count = gate.calls
    async with session.calling("probe__hang", **options) as (_, lines):
        await until(lambda: gate.calls > count)
    return lines[0].removeprefix("id: ")


def event_id_of(line: str) -> EventId:
    event_id = EventId.parse(line.removeprefix("id: "))
    assert event_id is not None
    return event_id


async def test_call_is_in_the_trajectory_before_its_first_event(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    gate = Gate()
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server.served)
        async with session.calling("probe__hang", request_id=5) as (coming, lines):
            (call,) = events(server.registry.live[0].trajectory, "call")
            first = event_id_of(lines[0])
            assert (first.key, first.kind, first.request) == (call["event_id"], Kind.CALL, 5)
            assert lines[1:] == ["data: "]
            assert call["event_id"].startswith(f"{server.store.generation}.")
            assert call["session"] == session.id
            gate.open.set()
            rest = [line async for line in coming if line]
        last = event_id_of(rest[0])
        assert (last.key, last.is_answer) == (first.key, True)


async def test_call_before_the_end_of_the_set_up_is_in_the_trajectory_and_can_be_fetched(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    gate, set_up = Gate(), SetUp()
    gate.open.set()
    provider = FakeProvider(tools={"probe": {**TOOLS["probe"], "hang": gate}}, run=set_up)
    async with restartable(tmp_path, provider) as server:
        session = await RawSession.open(http, server.served.task("made-answer"))
        await set_up.begun.wait()
        async with session.calling("probe__hang", request_id=5) as (_, lines):
            (accepted,) = events(server.registry.live[0].trajectory, "accepted")
            assert accepted["session"] == session.id
            assert event_id_of(lines[0]).key == accepted["event_id"]
        await server.restart(leaving_calls=True)
        async with session.resuming(lines[0].removeprefix("id: ")) as coming:
            assert gate.calls == 0
            set_up.over.set()
            assert any([line.startswith("data: {") async for line in coming])
        assert gate.calls == 1


async def test_claim_and_evaluation_are_answered_again_after_a_restart(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server.served)
        for number, name in enumerate(("claim_done", "evaluate"), 5):
            params = {"name": name, "_meta": {"decathlon/operation": "chosen"}}
            events = events_of(await session.post("tools/call", params, request_id=number))
            await server.restart()
            answer = answer_of(await session.resume(events[0]["id"]))
            assert answer == json.loads(events[-1]["data"])
        # Another request has not closed the attempt.
        answer = answer_of(await session.resume(str(EventId(server.store.generation, 0, Kind.CLAIM, 99))))
        assert answer["result"]["structuredContent"]["first"] is False


async def test_answers_at_the_lobby_are_made_again_after_a_restart(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    gate = Gate()
    gate.open.set()
    async with restartable(tmp_path, gate.provider()) as server:
        lobby = await RawSession.open(http, server.served.lobby)
        requests: list[tuple[str, dict[str, Any]]] = [
            ("start_episode", {"task": TASK}),
            ("probe__hang", {"text": "by name"}),
            ("call_tool", {"name": "probe__hang", "arguments": {"text": "nested"}}),
            ("claim_done", {}),
            ("evaluate", {}),
        ]
        for number, (name, arguments) in enumerate(requests, 5):
            if name == "call_tool":
                arguments["episode"] = server.registry.live[0].id
            params: dict[str, Any] = {"name": name, "arguments": arguments}
            events = events_of(await lobby.post("tools/call", params, request_id=number))
            await server.restart()
            answer = answer_of(await lobby.resume(events[0]["id"]))
            first = json.loads(events[-1]["data"])
            assert (answer["id"], name) == (number, name)
            if name == "start_episode":
                names = [each["result"]["structuredContent"]["episode"] for each in (answer, first)]
                assert names[0] == names[1]
            else:
                assert answer == first
        assert gate.calls == 2
        assert len(server.registry.live) == 1


async def test_client_that_comes_back_twice_for_a_started_episode_does_not_end_it(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    set_up = SetUp()
    async with restartable(tmp_path, FakeProvider(tools=TOOLS, run=set_up)) as server:
        lobby = await RawSession.open(http, server.served.lobby)
        async with lobby.calling("start_episode", task="made-answer") as (_, lines):
            await set_up.begun.wait()
        event_id = lines[0].removeprefix("id: ")
        (episode,) = server.registry.live
        async with lobby.resuming(event_id):
            pass
        # The second request that came back has ended: the first one still waits for the episode.
        await until(lambda: episode.lease.deadline < math.inf)
        async with lobby.resuming(event_id) as coming:
            set_up.over.set()
            assert any([line.startswith('data: {"jsonrpc":"2.0","id":7,"result"') async for line in coming])
        assert episode.state.phase is Phase.READY


async def test_list_that_waits_until_the_episode_is_ready_waits_also_for_a_client_that_comes_back(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    set_up = SetUp()
    set_up.over.set()
    provider = FakeProvider(tools=TOOLS, run=set_up)
    async with restartable(tmp_path, provider, caches=True) as server:
        task = server.served.task("made-answer")
        # Afterwards the server knows the tools before an episode is ready.
        await (await RawSession.open(http, task)).ask("tools/list")
        set_up.over = anyio.Event()
        session = await RawSession.open(http, task)
        (episode,) = (each for each in server.registry.live if each.state.phase is not Phase.READY)
        assert "result" in await session.ask("tools/list", request_id=6)
        async with session.asking("tools/list", {"_meta": {"decathlon/ready": True}}) as (_, lines):
            pass
        async with session.resuming(lines[0].removeprefix("id: ")) as coming:
            phases: list[Phase] = []

            async def read() -> None:
                phases.extend([episode.state.phase async for line in coming if line.startswith("data: {")])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await session.ask("ping", request_id=8)
                set_up.over.set()
        assert phases == [Phase.READY]


async def test_event_ids_give_no_access_to_other_episodes(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    tokens = tokens_of(tmp_path, alice="controller", bob="controller")
    async with restartable(tmp_path, tokens=tokens) as server:
        alice, bob = [
            await RawSession.open(http, server.served.lobby, authorization=f"Bearer {name}")
            for name in ("alice", "bob")
        ]
        params = {"name": "start_episode", "arguments": {"task": TASK}}
        started = events_of(await alice.post("tools/call", params, request_id=5))
        assert answer_of(await bob.resume(started[0]["id"]))["error"]["data"]["code"] == "unknown_episode"
        agent = server.registry.live[0].spec.agent_id
        for kind in (Kind.CALL, Kind.CLAIM, Kind.EVALUATE):
            event_id = EventId(server.store.generation, 0, kind, 5, agent)
            answer = answer_of(await bob.resume(str(event_id)))
            assert answer["error"]["data"]["code"] == "unknown_episode"
        assert server.registry.live[0].state.phase is Phase.READY
        bob.headers["mcp-session-id"] = alice.id
        assert (await bob.resume(started[0]["id"])).status_code == 404


async def test_agent_s_id_in_an_event_id_is_no_handle(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    async with restartable(tmp_path, FakeProvider(tools=TOOLS)) as server:
        owner = await RawSession.open(http, server.served.lobby)
        await owner.ask("tools/call", {"name": "start_episode", "arguments": {"task": TASK}}, request_id=4)
        (episode,) = server.registry.live
        agent = await RawSession.open(http, server.served.lobby)
        for kind in (Kind.START, Kind.EVALUATE, Kind.CLAIM):
            forged = EventId(server.store.generation, 99, kind, 7, episode.spec.agent_id)
            response = await agent.resume(str(forged))
            assert episode.id not in response.text
            assert "there is no such episode" in response.text
        assert episode.state.phase is Phase.READY


async def test_answers_can_be_fetched_for_a_while_after_the_end_of_the_episode(
    tmp_path: Path, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    gate.open.set()
    async with restartable(tmp_path, gate.provider()) as server:
        lobby = await RawSession.open(http, server.served.lobby)
        await lobby.ask("tools/call", {"name": "start_episode", "arguments": {"task": TASK}}, request_id=4)
        (episode,) = server.registry.live
        events = events_of(await lobby.post("tools/call", {"name": "probe__hang"}, request_id=5))
        monkeypatch.setattr(calls, "ANSWER_SECONDS", 0.3)
        episode.close()
        await episode.state.reach(Phase.ENDED)
        assert text_of(await lobby.resume(events[0]["id"])) == "through"
        await anyio.sleep(0.3)
        answer = answer_of(await lobby.resume(events[0]["id"]))
        assert answer["error"]["data"]["code"] == "unanswered"


async def test_replies_can_be_fetched_again_and_again(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    gate = Gate()
    request_ids: list[Any] = [7, 0, -1, "seven", "ü\n%2.x", "last"]
    async with restartable(tmp_path, gate.provider()) as server:
        session = await ready_session(http, server.served)
        event_ids = [
            await broken_call(session, gate, request_id=each, text=str(each)) for each in request_ids
        ]
        gate.open.set()
        for event_id, request_id in list(zip(event_ids, request_ids, strict=True)) * 2:
            answer = answer_of(await session.resume(event_id))
            assert answer["id"] == request_id
            assert answer["result"]["content"][0]["text"] == str(request_id)
        assert gate.calls == len(request_ids)


async def test_after_the_event_of_the_answer_there_is_nothing(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server.served)
        params = {"name": "probe__echo", "arguments": {"text": "x"}}
        events = events_of(await session.post("tools/call", params))
        response = await session.resume(events[-1]["id"])
        assert (response.status_code, response.text) == (200, "")


async def test_answer_that_cannot_be_made_again_is_an_error_under_its_id(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server.served)
        for kind in ("call", "claim", "start", "other"):
            event_id = EventId(server.store.generation, 0, Kind(kind), "old")
            answer = answer_of(await session.resume(str(event_id)))
            assert answer["id"] == "old"
            assert answer["error"]["data"]["code"] == "unanswered"


async def test_clients_of_earlier_revisions_get_json(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    """They cannot parse an event without data."""
    async with restartable(tmp_path) as server:
        session = await ready_session(http, server.served, version="2025-06-18")
        response = await session.post("tools/call", {"name": "probe__echo", "arguments": {"text": "x"}})
        assert response.headers["content-type"] == "application/json"
        await server.restart()
        assert await session.call("probe__echo", request_id=9, text="after") == "after"
