"""MCP clients for tests that run at every kind of address and with every protocol revision."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from tests.probe.serving import Served

AddressKind = Literal["task", "episode-handshake", "episode-sessionless"]
ADDRESS_KINDS: tuple[AddressKind, ...] = ("task", "episode-handshake", "episode-sessionless")
"""Kinds of address. At an episode's address a client uses MCP with a handshake or without sessions."""
ERAS = {"handshake": "legacy", "sessionless": "auto"}
"""Modes of the SDK's client. `auto` calls `server/discover` first and avoids sessions if the server does."""


@asynccontextmanager
async def connected(
    url: str, era: str = "handshake", *, token: str | None = None, **options: Any
) -> AsyncGenerator[Client]:
    """Connect a client of this protocol era, with a bearer token if one is given."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with create_mcp_http_client(headers=headers) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=ERAS[era], **options) as client:
            yield client


@dataclass(frozen=True, slots=True)
class Player:
    """A client and the episode that it plays."""

    client: Client
    episode_id: str

    async def call(self, name: str, **arguments: Any) -> Any:
        return await self.client.call_tool(name, arguments)

    async def text(self, name: str, **arguments: Any) -> str:
        return (await self.call(name, **arguments)).content[0].text


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """Call one of this server's own tools with wrong arguments; returns the text that an agent reads."""
    result: Any = await client.call_tool(tool, arguments)
    assert result.is_error, result.content
    assert result.meta["decathlon/error"]["retryable"] is False
    return result.content[0].text


async def start(served: Served, task_id: str, **options: Any) -> dict[str, Any]:
    """Start an episode in the lobby and return the result of `start_episode`."""
    async with connected(served.lobby, "handshake") as lobby:
        result = await lobby.call_tool("start_episode", {"task": task_id, **options})
        assert result.structured_content is not None
        return result.structured_content


@asynccontextmanager
async def playing(
    served: Served, task_id: str, address: AddressKind, **options: Any
) -> AsyncGenerator[Player]:
    """Start an episode of this task and connect a client to it. The episode ends when the context exits."""
    if address == "task":
        async with connected(served.task(task_id), **options) as client:
            yield Player(client, served.episodes.live[-1].id)
        return
    episode_id = (await start(served, task_id))["episode"]
    async with connected(served.episode(episode_id), address.removeprefix("episode-"), **options) as client:
        yield Player(client, episode_id)
        served.find(episode_id).close()
