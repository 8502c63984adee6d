"""The progress of one request: first of the server, then of the task's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.protocol import episode_service
from tests.probe.clients import connected
from tests.probe.serving import serving

pytestmark = pytest.mark.anyio

EARLIER_SECONDS = 100


async def test_progress_never_decreases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_service, "PROGRESS_SECONDS", 0.01)
    reported: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reported.append(progress)

    async with serving(tmp_path, provider="host") as served, connected(served.lobby) as lobby:
        started: Any = await lobby.call_tool("start_episode", {"task": "find-answer", "wait": False})
        address, handle = (started.structured_content[key] for key in ("address", "episode"))
        # As if the client had waited for that long.
        served.find(handle).started_at -= EARLIER_SECONDS
        async with connected(address) as client:
            await client.call_tool("probe__count", {"to": 3}, progress_callback=on_progress)
    assert 0 < reported[0] < 1
    assert reported[-3:] == [1, 2, 3]
    assert reported == sorted(reported)
