"""What the pages tell to paste, pasted."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from tests.docs.pages import below, block
from tests.docs.snippets import run
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio

PROGRAMS = [
    ("README.md", "A program of yours", "1.0 {'calls': 1.0"),
    ("README.md", "Any MCP client", "1.0\n"),
    ("docs/quickstart.md", "3. Play", "1.0 PASS"),
    ("docs/clients/decathlon-client.md", "decathlon_client", "1.0\n"),
    ("docs/clients/python-sdk.md", "Python SDK 2.x", "1.0\n"),
    ("docs/sampling.md", "Choosing tasks", "recount-ballots 0.0\n"),
]


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    state = tmp_path_factory.mktemp("state")
    async with serving(state, suite=("starter",), provider="local") as served:
        yield served


@pytest.mark.parametrize(("page", "heading", "last"), PROGRAMS, ids=lambda told: str(told).strip())
async def test_a_program_gets_the_reward_that_the_page_says(
    page: str, heading: str, last: str, served: Served, tmp_path: Path
) -> None:
    said = await run(block(page, heading, "python"), [sys.executable], url=served.url, folder=tmp_path)
    assert f"{said.splitlines()[-1]}\n".startswith(last)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl; on Debian: apt-get install curl")
async def test_curl_plays_a_whole_episode(served: Served, tmp_path: Path) -> None:
    said = await run(block("docs/clients/curl.md", "curl", "bash"), ["bash"], url=served.url, folder=tmp_path)
    assert '"text":"Reward 1.0: the attempt succeeded."' in said


async def test_the_entry_for_desktop_programs_is_a_lobby_to_play_in(tmp_path: Path) -> None:
    told, _ = below("README.md", "Claude Desktop, Claude Code, Cursor", "json")
    entry = json.loads(told.text)["mcpServers"]["toolathlon"]
    assert entry["command"].endswith("/decathlon-mcp")
    words = ["-m", "decathlon_mcp.cli", *entry["args"], "--state", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=words)
    with (tmp_path / "log").open("w") as log:
        async with stdio_client(server, errlog=log) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            await session.call_tool("start_episode", {"task": "tune-reactor"})
            assert "lab__run_simulation" in {tool.name for tool in (await session.list_tools()).tools}
            verdict = (await session.call_tool("evaluate", {})).structured_content
    assert verdict is not None
    assert verdict["reward"] == 0.0
