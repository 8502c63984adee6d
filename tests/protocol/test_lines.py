"""MCP over lines: every request has an answer, whatever is wrong with it, and also after the input's end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.protocol.stdio import serve_lines
from tests.driver.peer import until
from tests.episodes.environment import TOOLS, running_registry
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.messages import INITIALIZE, META, MODERN, PREFIX, TASK
from tests.protocol.test_messages import UNREADABLE

pytestmark = pytest.mark.anyio


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncGenerator[EpisodeRegistry]:
    async def slow(call: FakeCall) -> str:
        await call.progress(1)
        await anyio.sleep(0.3)
        return f"slow {call.arguments.get('text')}"

    tools = {"probe": {**TOOLS["probe"], "slow": slow}}
    async with running_registry(tmp_path, FakeProvider(tools=tools)) as registry:
        yield registry


def request(method: str, request_id: Any = 7, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def initialize(version: str = "2025-11-25") -> dict[str, Any]:
    return {**INITIALIZE, "params": {**INITIALIZE["params"], "protocolVersion": version}}


def call(tool: str, request_id: Any = 7, *, meta: dict[str, Any] | None = None, **arguments: Any) -> Any:
    members = {} if meta is None else {"_meta": meta}
    return request("tools/call", request_id, name=tool, arguments=arguments, **members)


async def answers(registry: EpisodeRegistry, *messages: Any, **options: Any) -> list[Any]:
    """What is answered to lines after which the input ends."""

    async def lines() -> AsyncGenerator[bytes]:
        for message in messages:
            yield message if isinstance(message, bytes) else json.dumps(message).encode()

    written: list[Any] = []

    async def write(line: bytes) -> None:
        assert b"\n" not in line
        written.append(json.loads(line))

    with anyio.fail_after(30):
        await serve_lines(registry, lines(), write, finishes=True, **options)
    return written


async def test_what_was_sent_before_the_end_of_the_input_is_answered(registry: EpisodeRegistry) -> None:
    calls = [call("probe__slow", number, text=number) for number in range(2, 6)]
    found = await answers(registry, initialize(), *calls, request("tools/list", 9), task=TASK)
    texts = {each["id"]: each["result"]["content"][0]["text"] for each in found if each["id"] in range(2, 6)}
    assert texts == {number: f"slow {number}" for number in range(2, 6)}
    assert {each["id"] for each in found} == {1, 2, 3, 4, 5, 9}
    await until(lambda: not registry.live)


async def test_without_a_handshake_requests_are_complete_alone(registry: EpisodeRegistry) -> None:
    found = await answers(
        registry,
        request("server/discover", 1, _meta=META),
        call("probe__slow", 2, meta={**META, "progressToken": "t"}),
        request("ping", 3, _meta=META),
        request("tools/list", 4, _meta={**META, PREFIX + "protocolVersion": "2099-01-01"}),
        request("tools/list", 5),
        task=TASK,
    )
    answered = {each["id"]: each for each in found if "id" in each}
    assert answered[1]["result"]["supportedVersions"] == [MODERN]
    assert answered[2]["result"]["resultType"] == "complete"
    codes = [answered[number]["error"]["code"] for number in (3, 4, 5)]
    assert codes == [-32601, -32022, -32600]
    (progress,) = [each["params"] for each in found if each.get("method") == "notifications/progress"]
    assert progress["progressToken"] == "t"


async def test_unreadable_request_is_answered_under_its_id(registry: EpisodeRegistry) -> None:
    found = await answers(registry, initialize(), *UNREADABLE.values(), request("ping", 2))
    assert [each["id"] for each in found] == [1, *("a" for _ in UNREADABLE), 2]
    assert all("error" in each for each in found[1:-1])


async def test_batch_is_answered_as_one_in_its_revision(registry: EpisodeRegistry) -> None:
    batch = [request("ping", "a"), call("probe__slow", 5, text="b"), {"id": 6}, initialize()]
    found = await answers(registry, initialize("2025-03-26"), batch, task=TASK)
    members: Any = next(each for each in found if not isinstance(each, dict))
    assert {each["id"]: "error" in each for each in members} == {"a": False, 5: False, 6: True, 1: True}


async def test_requests_of_a_batch_in_another_revision_are_each_refused(registry: EpisodeRegistry) -> None:
    batch = [request("ping", "a"), request("ping", 5), {"jsonrpc": "2.0", "method": "notifications/x"}]
    found = await answers(registry, initialize("2025-06-18"), batch)
    assert [(each["id"], "error" in each) for each in found] == [(1, False), ("a", True), (5, True)]


async def test_cancelled_request_has_no_answer_and_others_have(registry: EpisodeRegistry) -> None:
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}
    found = await answers(
        registry, initialize(), call("probe__hang", 2), call("probe__slow", "2"), cancelled, task=TASK
    )
    assert [each["id"] for each in found] == [1, "2"]


async def test_client_that_reads_no_more_ends_what_it_has_asked_for(registry: EpisodeRegistry) -> None:
    async def lines() -> AsyncGenerator[bytes]:
        for message in (initialize(), call("probe__hang", 2)):
            yield json.dumps(message).encode()
        await until(lambda: bool(registry.live) and registry.live[0].calls.sent == 1)
        yield json.dumps(request("ping", 3)).encode()

    written: list[bytes] = []

    async def write(line: bytes) -> None:
        if written:
            raise BrokenPipeError
        written.append(line)

    with anyio.fail_after(30):
        await serve_lines(registry, lines(), write, task=TASK, finishes=True)
    await until(lambda: not registry.live)
