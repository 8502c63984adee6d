"""Real MCP clients on every way in, for the same test to be run over each."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from tests.probe.serving import Served

EpisodeResolver = Literal[
    "task", "episode-handshake", "episode-sessionless", "lobby-handshake", "lobby-sessionless"
]
WAYS: tuple[EpisodeResolver, ...] = ("task", "episode-handshake", "episode-sessionless")
ERAS = {"handshake": "legacy", "sessionless": "auto"}
"""`auto` asks `server/discover` first and stays sessionless where the server is."""


@asynccontextmanager
async def connected(
    url: str, era: str = "handshake", *, token: str | None = None, **options: Any
) -> AsyncGenerator[Client]:
    """A client of that era, which shows that token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with create_mcp_http_client(headers=headers) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=ERAS[era], **options) as client:
            yield client


@dataclass(frozen=True, slots=True)
class Player:
    """A client at an episode of its own."""

    client: Client
    episode_id: str

    async def call(self, name: str, **arguments: Any) -> Any:
        return await self.client.call_tool(name, arguments)

    async def text(self, name: str, **arguments: Any) -> str:
        return (await self.call(name, **arguments)).content[0].text


async def start(served: Served, task_id: str, **options: Any) -> dict[str, Any]:
    """What the lobby's `start_episode` says."""
    async with connected(served.lobby, "handshake") as lobby:
        result = await lobby.call_tool("start_episode", {"task": task_id, **options})
        assert result.structured_content is not None
        return result.structured_content


@asynccontextmanager
async def playing(
    served: Served, task_id: str, way: EpisodeResolver, **options: Any
) -> AsyncGenerator[Player]:
    """An episode of that task, and a client that plays it by that way in."""
    if way == "task":
        async with connected(served.task(task_id), **options) as client:
            yield Player(client, served.episodes.live[-1].id)
        return
    episode_id = (await start(served, task_id))["episode"]
    async with connected(served.episode(episode_id), way.removeprefix("episode-"), **options) as client:
        yield Player(client, episode_id)
        served.episodes._episodes[episode_id].close()  # pyright: ignore[reportPrivateUsage]
