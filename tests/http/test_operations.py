"""Requests that are sent again over HTTP: the tool runs once, and each of them gets its reply."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from decathlon_mcp.episodes import calls
from decathlon_mcp.episodes.call import MAX_OPERATION_CHARACTERS
from decathlon_mcp.protocol.episode_service import EPISODE_KEY
from decathlon_mcp.protocol.messages import OPERATION_KEY
from tests.clients.relay import relayed
from tests.driver.peer import until
from tests.fakes.driver import FakeCall, ToolError
from tests.fakes.provider import FakeProvider
from tests.http.messages import ACCEPT, INITIALIZE
from tests.http.test_lost_clients import served_by_fake
from tests.probe.clients import connected, start
from tests.probe.serving import Served
from tests.storage.trajectories import events

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ERAS = ["handshake", "sessionless"]


@dataclass(slots=True)
class Tools:
    """A task's server that counts what it runs. `slow` waits until `finish` is set."""

    runs: int = 0
    cancelled: int = 0
    metas: list[Any] = field(default_factory=list[Any])
    running: anyio.Event = field(default_factory=anyio.Event)
    finish: anyio.Event = field(default_factory=anyio.Event)

    async def quick(self, call: FakeCall) -> str:
        self.runs += 1
        self.metas.append(call.params.get("_meta"))
        return f"run {self.runs} of {call.arguments.get('text')}"

    async def slow(self, call: FakeCall) -> str:
        self.runs += 1
        self.running.set()
        try:
            await self.finish.wait()
        except BaseException:
            self.cancelled += 1
            raise
        return f"run {self.runs}"

    async def refuse(self, call: FakeCall) -> str:
        self.runs += 1
        raise ToolError(f"refused {self.runs}")


@dataclass(frozen=True, slots=True)
class Play:
    served: Served
    tools: Tools
    id: str

    @property
    def url(self) -> str:
        return self.served.episode(self.id)

    async def call(
        self, name: str, operation: str | None, *, era: str = "sessionless", **arguments: Any
    ) -> Any:
        """Call with a connection of its own; returns the text of the result, or the error."""
        meta: Any = {} if operation is None else {OPERATION_KEY: operation}
        async with connected(self.url, era) as client:
            try:
                result: Any = await client.call_tool(f"probe__{name}", arguments, meta=meta)
            except MCPError as error:
                return error.error
            return result.content[0].text


@pytest.fixture
async def play(tmp_path: Path) -> AsyncGenerator[Play]:
    tools = Tools()
    provider = FakeProvider(
        tools={"probe": {"quick": tools.quick, "slow": tools.slow, "refuse": tools.refuse}}
    )
    async with served_by_fake(tmp_path, provider) as served:
        yield Play(served, tools, (await start(served, "find-answer"))["episode"])


@asynccontextmanager
async def session(url: str, version: str = "2025-11-25") -> AsyncGenerator[httpx2.AsyncClient]:
    """A handshake-era session over plain HTTP, in which requests can have any id."""
    params = {**INITIALIZE["params"], "protocolVersion": version}
    async with httpx2.AsyncClient(headers=ACCEPT, timeout=10) as http:
        opened = await http.post(url, json={**INITIALIZE, "params": params})
        http.headers["Mcp-Session-Id"] = opened.headers["mcp-session-id"]
        await http.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        yield http


def request(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": f"probe__{name}", "arguments": arguments}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


@pytest.mark.parametrize("era", ERAS)
async def test_request_sent_again_gets_the_first_reply_and_runs_nothing(play: Play, era: str) -> None:
    for _ in range(3):
        assert await play.call("quick", "one", era=era, text="a") == "run 1 of a"
    assert await play.call("quick", "two", era=era, text="a") == "run 2 of a"
    assert await play.call("quick", None, era=era, text="a") == "run 3 of a"
    calls = events(play.served.find(play.id).trajectory, "call")
    assert [(event["seq"], event.get("operation")) for event in calls][:2] == [(1, "one"), (2, "two")]
    assert all(OPERATION_KEY not in (meta or {}) for meta in play.tools.metas)


async def test_requests_with_one_operation_at_the_same_time_run_once(play: Play) -> None:
    replies: list[str] = []

    async def call(era: str) -> None:
        replies.append(await play.call("slow", "same", era=era))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            for era in ERAS:
                tasks.start_soon(call, era)
        await play.tools.running.wait()
        await anyio.sleep(0.3)
        play.tools.finish.set()
    assert replies == ["run 1"] * 10
    assert play.tools.runs == 1


async def test_operation_with_other_arguments_or_another_tool_is_an_error(play: Play) -> None:
    await play.call("quick", "one", text="a", more={"x": 1, "y": [1.5]})
    assert await play.call("quick", "one", more={"y": [1.5], "x": 1}, text="a") == "run 1 of a"
    for name, arguments in (("quick", {"text": "b"}), ("refuse", {"text": "a"}), ("quick", {})):
        error = await play.call(name, "one", **arguments)
        assert "'one' was another call" in error.message
        assert (error.code, error.data["code"]) == (-32602, "bad_request")
    assert play.tools.runs == 1


async def test_operation_that_is_no_short_string_is_refused(play: Play) -> None:
    operations: tuple[Any, ...] = ("", "x" * (MAX_OPERATION_CHARACTERS + 1), 7, None, ["a"])
    async with session(play.url) as http:
        for operation in operations:
            body = request(5, "quick")
            body["params"]["_meta"] = {OPERATION_KEY: operation}
            assert "must be a string of 1 to 256 characters" in (await http.post(play.url, json=body)).text
    assert play.tools.runs == 0


async def test_tools_of_the_lobby_relay_operations(play: Play) -> None:
    arguments = {"episode": play.id, "name": "probe__quick", "arguments": {"text": "a"}}
    for era in ERAS * 2:
        async with connected(play.served.lobby, era) as lobby:
            result: Any = await lobby.call_tool("call_tool", arguments, meta={OPERATION_KEY: "one"})  # pyright: ignore
            assert result.content[0].text == "run 1 of a"


def waiting(play: Play) -> int:
    """The requests that wait for the call that runs."""
    (call,) = play.served.find(play.id).calls.unanswered
    return len(call.waiters)


@asynccontextmanager
async def broken_call(play: Play) -> AsyncGenerator[httpx2.AsyncClient]:
    """A session whose connection broke while it called `slow`, connected again in the body."""
    async with anyio.create_task_group() as tasks, relayed(play.served) as (relay, url):
        async with session(f"{url}/episodes/{play.id}/mcp") as http:

            async def lose() -> None:
                with pytest.raises(httpx2.TransportError):
                    await http.post(f"{url}/episodes/{play.id}/mcp", json=request(5, "slow"))

            tasks.start_soon(lose)
            await play.tools.running.wait()
            await relay.cut()
            yield http
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("operation", [None, "new"])
async def test_same_call_of_the_session_gets_the_reply_of_one_whose_connection_broke(
    play: Play, operation: str | None
) -> None:
    again = request(6, "slow")
    again["params"]["_meta"] = {} if operation is None else {OPERATION_KEY: operation}

    async def finish() -> None:
        await until(lambda: waiting(play) == 2)
        play.tools.finish.set()

    async with broken_call(play) as http, anyio.create_task_group() as tasks:
        tasks.start_soon(finish)
        assert "run 1" in (await http.post(play.url, json=again)).text
        if operation:
            assert events(play.served.find(play.id).trajectory, "joined")
            assert await play.call("slow", operation, era="handshake") == "run 1"
        else:
            # Now it has the reply.
            assert "run 2" in (await http.post(play.url, json=again)).text
    assert play.tools.cancelled == 0


async def test_batch_of_the_session_gets_the_replies_of_one_whose_connection_broke(play: Play) -> None:
    """Also of the call that had its reply, which waited for the other call's."""
    batch = [request(5, "quick", text="a"), request(6, "slow")]
    async with anyio.create_task_group() as tasks, relayed(play.served) as (relay, url):
        async with session(f"{url}/episodes/{play.id}/mcp", "2025-03-26") as http:

            async def lose() -> None:
                with pytest.raises(httpx2.TransportError):
                    await http.post(f"{url}/episodes/{play.id}/mcp", json=batch)

            tasks.start_soon(lose)
            await play.tools.running.wait()
            await until(lambda: len(play.served.find(play.id).calls.unanswered) == 1)
            await relay.cut()

            async def finish() -> None:
                await until(lambda: waiting(play) == 2)
                play.tools.finish.set()

            tasks.start_soon(finish)
            answers = {each["id"]: each for each in (await http.post(play.url, json=batch)).json()}
            texts = [answers[number]["result"]["content"][0]["text"] for number in (5, 6)]
            assert texts == ["run 1 of a", "run 2"]
            # Now it has the replies.
            assert "run 3 of a" in (await http.post(play.url, json=batch[:1])).text
        tasks.cancel_scope.cancel()


async def test_other_arguments_in_a_session_whose_call_broke_are_another_call(play: Play) -> None:
    async with broken_call(play) as http:
        play.tools.finish.set()
        assert "run 2" in (await http.post(play.url, json=request(5, "slow", text="b"))).text


async def test_call_that_its_client_cancelled_is_not_repeated(play: Play) -> None:
    async with session(play.url) as http, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(http.post, play.url, json=request(5, "slow")))
        await play.tools.running.wait()
        params = {"requestId": 5}
        await http.post(
            play.url, json={"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        )
        await until(lambda: play.tools.cancelled == 1)
        play.tools.finish.set()
        assert "run 2" in (await http.post(play.url, json=request(6, "slow"))).text


async def test_sessionless_call_without_an_operation_ends_with_its_connection(play: Play) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play.call, "slow", None)
        await play.tools.running.wait()
        tasks.cancel_scope.cancel()
    await until(lambda: play.tools.cancelled == 1)


async def test_sessionless_call_whose_client_will_not_come_back_is_cancelled(play: Play) -> None:
    async def notify(url: str, **meta: str) -> int:
        message = {
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"_meta": {OPERATION_KEY: "one", **meta}},
        }
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2026-07-28"}
        async with httpx2.AsyncClient(headers=headers) as http:
            return (await http.post(url, json=message)).status_code

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play.call, "slow", "one")
        await play.tools.running.wait()
        tasks.cancel_scope.cancel()
    await anyio.sleep(0.3)
    assert play.tools.cancelled == 0
    lobby = f"{play.served.url}/mcp"
    assert await notify(lobby, **{EPISODE_KEY: "unknown"}) >= 400
    assert await notify(lobby, **{EPISODE_KEY: play.id}) == 202
    await until(lambda: play.tools.cancelled == 1)


async def test_call_is_cancelled_when_all_its_callers_have_cancelled_it(play: Play) -> None:
    async with session(play.url) as first, anyio.create_task_group() as tasks:
        posted: list[str] = []

        async def post(http: httpx2.AsyncClient, number: int) -> None:
            body = request(number, "slow")
            body["params"]["_meta"] = {OPERATION_KEY: "one"}
            posted.append((await http.post(play.url, json=body)).text)

        async def cancel(number: int) -> None:
            params = {"requestId": number}
            message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            await first.post(play.url, json=message)

        for number in (5, 6):
            tasks.start_soon(post, first, number)
        await play.tools.running.wait()
        await anyio.sleep(0.3)
        await cancel(5)
        await until(lambda: len(posted) == 1)
        assert play.tools.cancelled == 0
        await cancel(6)
        await until(lambda: len(posted) == 2)
    assert (play.tools.runs, play.tools.cancelled) == (1, 1)


async def test_replies_of_an_episode_are_read_again_one_after_the_other(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, at_once = list[int](), list[int]()
    read_outcome = calls._read_outcome  # pyright: ignore[reportPrivateUsage]

    def read(trajectory: Any, seq: int) -> Any:
        reading.append(seq)
        at_once.append(len(reading))
        time.sleep(0.05)
        reading.remove(seq)
        return read_outcome(trajectory, seq)

    monkeypatch.setattr(calls, "_read_outcome", read)
    first = await play.call("quick", "a", text="x")

    async def call_again() -> None:
        assert await play.call("quick", "a", text="x") == first

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(call_again)
    assert at_once == [1] * 10
