"""`POST /episodes`: an episode lasts as long as the response that its starter reads."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.plugins.cluster import held_episodes
from tests.probe.clients import connected
from tests.probe.serving import Served, serving
from tests.survival.servers import supervised_server

pytestmark = pytest.mark.anyio

TASK = {"task": "find-answer"}
KEY = {"Idempotency-Key": "first"}


class Lines:
    """The lines of one response. `start` is the first."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = aiter(response.aiter_lines())
        self.start: dict[str, Any] = {}

    async def next(self) -> dict[str, Any]:
        return json.loads(await anext(self._lines))

    async def rest(self) -> list[dict[str, Any]]:
        return [json.loads(line) async for line in self._lines]


@asynccontextmanager
async def holding(
    url: str, headers: dict[str, str] | None = None, arguments: dict[str, Any] = TASK
) -> AsyncGenerator[Lines]:
    async with httpx2.AsyncClient(timeout=60) as client:
        async with client.stream("POST", f"{url}/episodes", json=arguments, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            lines = Lines(response)
            lines.start = await lines.next()
            yield lines


async def post(url: str, content: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    sent = {"content-type": "application/json", **headers}
    async with httpx2.AsyncClient(timeout=60) as client:
        response = await client.post(f"{url}/episodes", content=content, headers=sent)
    return response.status_code, response.json()["error"]


async def test_an_episode_is_played_at_its_address_and_ends_with_the_response(served: Served) -> None:
    async with holding(served.url) as lines:
        assert lines.start["address"] == served.episode(lines.start["episode"])
        assert lines.start["task"] == "find-answer"
        assert lines.start["prompt"]
        async with connected(lines.start["address"]) as client:
            assert not (await client.call_tool("claim_done", {})).is_error
        episode = served.find(lines.start["episode"])
        assert episode.records.progress.requested_ending is None
    await episode.state.reach(Phase.ENDED)
    assert episode.records.progress.requested_ending is Ending.CLIENT_LOST


async def test_lines_say_that_the_server_lives_and_the_last_one_how_the_episode_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_episodes, "HEARTBEAT_SECONDS", 0.05)
    async with holding(served.url) as lines:
        episode = served.find(lines.start["episode"])
        await episode.state.reach(Phase.READY)
        while (await lines.next())["phase"] != "ready":
            pass
        assert await lines.next() == {"phase": "ready"}
        episode.close()
        assert (await lines.rest())[-1] == {"phase": "ended", "ending": str(Ending.CLOSED)}


async def test_a_request_that_is_sent_again_gets_the_episode_which_ends_with_the_newest_response(
    served: Served,
) -> None:
    async with holding(served.url, KEY) as first:
        async with holding(served.url, KEY) as second:
            assert second.start["episode"] == first.start["episode"]
            episode = served.find(first.start["episode"])
            await episode.state.reach(Phase.READY)
        await episode.state.reach(Phase.ENDED)


async def test_the_end_of_an_older_response_does_not_end_the_episode(served: Served) -> None:
    async with anyio.create_task_group() as tasks:
        older = anyio.CancelScope()
        is_open, is_closed = anyio.Event(), anyio.Event()

        async def hold_first() -> None:
            with older:
                async with holding(served.url, {"Idempotency-Key": "second"}):
                    is_open.set()
                    await anyio.sleep_forever()
            is_closed.set()

        tasks.start_soon(hold_first)
        await is_open.wait()
        async with holding(served.url, {"Idempotency-Key": "second"}) as lines:
            older.cancel()
            await is_closed.wait()
            async with connected(lines.start["address"]) as client:
                assert (await client.list_tools()).tools


@pytest.mark.parametrize(
    ("content", "status", "part"),
    [
        (b'{"task": "find-answr"}', 404, "find-answer"),
        (b'{"task": "find-answer", "colour": 1}', 400, "colour"),
        (b"[]", 400, "must be a JSON object"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    served: Served, content: bytes, status: int, part: str
) -> None:
    refused_with, error = await post(served.url, content)
    assert refused_with == status
    assert part in error["message"]
    refused_with, error = await post(served.url, content, **{"Idempotency-Key": "k" * 257})
    assert refused_with == 400


async def test_a_token_is_needed_where_the_server_has_tokens(tmp_path: Path) -> None:
    secret, line = new_token("trainer", "player")
    (tmp_path / "tokens").write_text(line)
    async with serving(tmp_path / "state", tokens=Tokens.read(tmp_path / "tokens")) as served:
        status, _ = await post(served.url, json.dumps(TASK).encode())
        assert status == 401
        async with holding(served.url, {"Authorization": f"Bearer {secret}"}) as lines:
            assert served.find(lines.start["episode"]).spec.owner.token == "trainer"


async def test_an_episode_goes_on_after_a_kill_if_its_starter_comes_back_and_ends_if_not(
    tmp_path: Path,
) -> None:
    async with supervised_server(tmp_path / "state", "--grace-seconds", "10") as server:
        async with (
            holding(server.url, {"Idempotency-Key": "stays-away"}) as first,
            holding(server.url, {"Idempotency-Key": "returns"}) as second,
        ):
            for lines in (first, second):
                async with connected(lines.start["address"]) as client:
                    await client.list_tools()
            await server.kill()
            with pytest.raises(httpx2.HTTPError):
                await second.rest()
        away, returned = first.start["episode"], second.start["episode"]
        async with holding(server.url, {"Idempotency-Key": "returns"}) as lines:
            assert lines.start["episode"] == returned
            async with connected(lines.start["address"]) as client:
                assert (await client.list_tools()).tools
                # Not by asking for its status, by which it would be in use again.
                await wait_for_episodes(server.url, 1)
            assert await ending_of(server.url, returned) is None
            assert await ending_of(server.url, away) == str(Ending.CLIENT_LOST)


async def wait_for_episodes(url: str, count: int) -> None:
    async with httpx2.AsyncClient() as client:
        while (await client.get(f"{url}/healthz")).json()["episodes"] != count:  # noqa: ASYNC110
            await anyio.sleep(0.1)


async def ending_of(url: str, handle: str) -> str | None:
    async with connected(f"{url}/mcp") as lobby:
        status: Any = await lobby.call_tool("episode_status", {"episode": handle})
        return status.structured_content.get("ending")
