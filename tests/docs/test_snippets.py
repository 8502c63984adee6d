"""The pages' programs and configurations, run as printed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from tests.docs.pages import below, block
from tests.docs.snippets import run
from tests.probe.serving import Served, module_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROGRAMS = [
    ("docs/quickstart.md", "3. Play", "1.0 PASS"),
    ("docs/clients.md", "decathlon_client", "1.0\n"),
    ("docs/clients.md", "Python SDK 2.x", "1.0\n"),
    ("docs/sampling.md", "Choosing tasks", "recount-ballots 0.0\n"),
    ("docs/sampling.md", "A curriculum that lives", "tune-reactor 0.0 1\n"),
    ("docs/training.md", "Credit for each call", "[0.0, 1.0, 0.0]\n"),
]
"""Page, heading, and how the last line of the output starts."""


# As `serve` does, whose store has an episode from its beginning.
served = module_server(suite=("starter",), provider="host", isolation="auto", survives=True)


@pytest.mark.parametrize(
    ("page", "heading", "reward"),
    [
        pytest.param(*program, id=program[1], marks=() if "quickstart" in program[0] else pytest.mark.long)
        for program in PROGRAMS
    ],
)
async def test_program_prints_the_reward(
    page: str, heading: str, reward: str, served: Served, tmp_path: Path
) -> None:
    output = await run(block(page, heading, "python"), [sys.executable], url=served.url, folder=tmp_path)
    assert f"{output.splitlines()[-1]}\n".startswith(reward)


async def test_the_environment_of_the_readme_starts_its_own_server(tmp_path: Path) -> None:
    own_state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    program = block("README.md", "Train", "python")
    output = await run(program, [sys.executable], url=None, folder=tmp_path, environment=own_state)
    assert output.splitlines()[-1].startswith("0.0 {'calls': 1.0")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing; on Debian: apt-get install curl")
async def test_curl_plays_an_episode(served: Served, tmp_path: Path) -> None:
    program = block("docs/clients.md", "curl", "bash")
    output = await run(program, ["bash"], url=served.url, folder=tmp_path)
    assert '"text":"Reward 1.0: the attempt succeeded."' in output


async def test_configuration_of_desktop_programs_starts_a_lobby(tmp_path: Path) -> None:
    (configuration,) = below("README.md", "Play", "json")
    entry = json.loads(configuration.text)["mcpServers"]["toolathlon"]
    assert entry["command"].endswith("/decathlon-mcp")
    arguments = ["-m", "decathlon_mcp.cli", *entry["args"], "--state", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=arguments)
    with (tmp_path / "log").open("w") as log:
        async with stdio_client(server, errlog=log) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            await session.call_tool("start_episode", {"task": "tune-reactor"})
            assert "lab__run_simulation" in {tool.name for tool in (await session.list_tools()).tools}
            verdict = (await session.call_tool("evaluate", {})).structured_content
    assert verdict is not None
    assert verdict["reward"] == 0.0
