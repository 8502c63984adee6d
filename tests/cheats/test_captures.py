"""Workspaces that a server or an engine cannot copy: they are forfeited, and nobody else is affected."""

from __future__ import annotations

import tracemalloc

import pytest

from decathlon_mcp.archives import packing
from decathlon_mcp.plugins.docker import engine, sandbox
from tests.cheats.agent import SOLUTIONS, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

FILES = "import os\nfor n in range(3_000): os.mknod(f'{n}')"
DEEP_NAMES = """
import os, stat
for _ in range(900):
    os.mkdir("d")
    os.chdir("d")
os.mknod("s", stat.S_IFSOCK | 0o600)
for number in range(20_000):
    os.link("s", str(number))
"""
SOCKETS = """
import os, stat
for first in range(8):
    os.mknod(f"s{first}", stat.S_IFSOCK | 0o600)
    for number in range(60_000):
        os.link(f"s{first}", f"{first}-{number}")
"""


async def test_more_files_than_are_packed_are_forfeited_by_every_provider(
    cheats: CheatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_ENTRIES", 2_000)
    async with cheats.unrewarded_episode(status="forfeited") as agent:
        await agent.shell(SOLUTIONS["sum-prices"])
        await agent.python(FILES)
        verdict = await agent.verdict()
    assert "(it exceeded its limit of" in verdict["detail"], verdict


async def test_names_that_no_archive_has_take_no_memory_of_the_server(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        await agent.shell(SOLUTIONS["sum-prices"])
        assert await agent.python(DEEP_NAMES) == ""
        tracemalloc.start()
        try:
            verdict = await agent.verdict()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict
    assert peak_bytes < 40_000_000  # a list of the paths has 150 MB


async def test_engine_that_an_agents_files_keep_silent_is_the_agents_fault(
    cheats: CheatServer, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider != "docker":
        pytest.skip("only an engine packs what the server cannot count")
    monkeypatch.setattr(engine, "REQUEST_SECONDS", 5.0)
    monkeypatch.setattr(sandbox, "RESTART_SECONDS", 1.0)
    async with cheats.unrewarded_episode(status="forfeited") as agent:
        await agent.shell(SOLUTIONS["sum-prices"])
        assert await agent.python(SOCKETS) == ""
        verdict = await agent.verdict()
    assert "(a control sandbox worked)" in verdict["detail"], verdict


async def test_memory_filled_at_the_capture_is_the_agents_fault(cheats: CheatServer, provider: str) -> None:
    """What copies a workspace may need memory of the sandbox."""
    if provider == "docker":
        pytest.skip("its files are on a disk")
    async with cheats.unrewarded_episode(or_forfeited=True) as agent:
        await agent.attack("full-memory")
