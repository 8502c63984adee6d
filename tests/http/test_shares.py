"""Shares of several tokens on one server: sandboxes, queue and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from decathlon_mcp.protocol import sessions
from tests.http.messages import ACCEPT, INITIALIZE, tokens_of
from tests.probe.clients import connected
from tests.probe.serving import serving

SESSION = "mcp-session-id"
pytestmark = pytest.mark.anyio


async def open_session(http: httpx2.AsyncClient, url: str, token: str | None) -> httpx2.Response:
    authorization = {"authorization": f"Bearer {token}"} if token else {}
    return await http.post(url, json=INITIALIZE, headers={**ACCEPT, **authorization})


async def test_one_token_cannot_take_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(tmp_path, ada="player", bob="player")
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    async with serving(tmp_path, tokens=tokens, provider="host") as served:
        async with httpx2.AsyncClient() as http:
            opened = [await open_session(http, served.lobby, "ada") for _ in range(3)]
            assert [SESSION in response.headers for response in opened] == [True, True, False]
            assert opened[2].json()["error"]["data"]["code"] == "at_capacity"
            assert SESSION in (await open_session(http, served.lobby, "bob")).headers
            ended = {**ACCEPT, "authorization": "Bearer ada"}
            await http.delete(
                served.lobby, headers={**ended, "mcp-session-id": opened[0].headers["mcp-session-id"]}
            )
            assert SESSION in (await open_session(http, served.lobby, "ada")).headers


async def test_an_agent_without_a_token_cannot_take_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_AGENT_SESSIONS", 2)
    tokens = tokens_of(tmp_path, ada="player")
    async with serving(tmp_path, tokens=tokens, provider="host") as served:
        async with connected(served.lobby, token="ada") as ada, httpx2.AsyncClient() as http:
            reply: Any = await ada.call_tool("start_episode", {"task": "find-answer"})
            started = reply.structured_content
            opened = [await open_session(http, started["agent_address"], None) for _ in range(3)]
            assert [SESSION in response.headers for response in opened] == [True, True, False]
            assert SESSION in (await open_session(http, started["address"], "ada")).headers
