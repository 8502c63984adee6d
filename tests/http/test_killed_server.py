"""Real clients whose server is killed with SIGKILL and started again on the same socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.http.restarting import killable_server
from tests.probe.clients import connected

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ADDRESSES = ("mcp", pytest.param("tasks/find-answer/mcp", marks=pytest.mark.long))


async def open_episode(client: Any, address: str) -> None:
    """In the lobby, start an episode, whose tools the session then has. Then no request is in flight."""
    if address == "mcp":
        await client.call_tool("start_episode", {"task": "find-answer"})
    else:
        # The client sends `notifications/initialized` in the background, and this after it.
        await client.session.send_ping()


@pytest.mark.parametrize("address", ADDRESSES)
async def test_call_in_flight_at_a_kill_returns_its_result(tmp_path: Path, address: str) -> None:
    async with killable_server(tmp_path) as server, connected(f"{server.url}/{address}") as client:
        await open_episode(client, address)
        result: list[Any] = []

        async def call() -> None:
            result.append(await client.call_tool("probe__sleep", {"seconds": 3, "text": "first"}))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await server.called(1)
                await server.kill()
                await anyio.sleep(1)
                await server.start()
            assert not result[0].is_error
            assert server.calls == ["first"]
            later: Any = await client.call_tool("probe__echo", {"text": "later"})
            assert later.content[0].text == "later"


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.long
async def test_session_goes_on_after_two_kills_between_calls(tmp_path: Path, address: str) -> None:
    async with killable_server(tmp_path) as server, connected(f"{server.url}/{address}") as client:
        await open_episode(client, address)
        with anyio.fail_after(60):
            for text in ("one", "two"):
                await server.kill()
                await server.start()
                reply: Any = await client.call_tool("probe__echo", {"text": text})
                assert reply.content[0].text == text


@pytest.mark.long
async def test_many_calls_in_flight_at_a_kill_return_their_own_results(tmp_path: Path) -> None:
    async with killable_server(tmp_path) as server, connected(f"{server.url}/mcp") as client:
        await open_episode(client, "mcp")
        texts = [f"call {number}" for number in range(16)]
        results: dict[str, bool] = {}

        async def call(text: str) -> None:
            reply: Any = await client.call_tool("probe__sleep", {"seconds": 3, "text": text})
            results[text] = reply.is_error

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for text in texts:
                    tasks.start_soon(call, text)
                await server.called(len(texts))
                await server.kill()
                await server.start()
        assert results == dict.fromkeys(texts, False)
        assert sorted(server.calls) == sorted(texts)
