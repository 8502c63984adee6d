"""The clients' programs of `docs/clients/`, each with the real library in an environment of its own.

Not run with the others (it installs gigabytes), but by name:

    python -m pytest tests/docs/clients.py

Each is run as it stands in its page, at a task's address; again at an episode's own; and, where the client
keeps a session, in the lobby, changed as its page says: each time it must be one sandbox. Where one wants
a model, one of ours stands in for it (`stand_in.py`) and plays the task's oracle.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import pytest
from decathlon_client import Decathlon

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.state import Phase
from tests.conformance.suites import environment as with_node
from tests.conformance.suites import node, run_npm
from tests.docs.pages import REPOSITORY, SERVER, Block, block, inline
from tests.docs.snippets import run
from tests.docs.stand_in import TASK, stand_in
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

INSTALL_SECONDS = 900
GONE_SECONDS = 60
AT_TASK = f"{SERVER}/tasks/{TASK}/mcp"
LISTING = re.compile(r"list_?tools\(", re.IGNORECASE)

EpisodeResolver = Literal["task", "episode", "lobby"]
ALL: tuple[EpisodeResolver, ...] = ("task", "episode", "lobby")
BOTH: tuple[EpisodeResolver, ...] = ("task", "episode")


@dataclass(frozen=True, slots=True)
class Client:
    """A client's page, where its program stands there, what it wants, and how it can be led to an episode."""

    page: str
    heading: str
    wants: tuple[str, ...]
    ways: tuple[EpisodeResolver, ...] = BOTH
    language: Literal["python", "js"] = "python"

    def program(self) -> Block:
        return block(f"docs/clients/{self.page}.md", self.heading, self.language)

    def in_lobby(self) -> Block:
        """The program, changed as its page says under In the lobby."""
        program = self.program()
        page = program.page.read_text("utf-8")
        assert "## In the lobby" in page
        said = [token.content for token in inline(program.page, "code_inline")]
        address = next(code for code in said if code.startswith(f'"{SERVER}/mcp"'))
        start = next(code for code in said if "start_episode" in code and code.startswith("await "))
        lines = program.text.replace(f'"{AT_TASK}"', address).splitlines(keepends=True)
        place = next(number for number, line in enumerate(lines) if LISTING.search(line))
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        return replace(program, text="".join([*lines[:place], f"{indent}{start}\n", *lines[place:]]))


CLIENTS = (
    Client("python-sdk-1", "Python SDK 1.x", ("mcp>=1.24,<2",), ALL),
    Client("python-sdk", "Python SDK 2.x", ("mcp>=2,<3",), ALL),
    Client("typescript-sdk", "Version 2", ("@modelcontextprotocol/client@2",), ALL, "js"),
    Client("typescript-sdk", "Version 1", ("@modelcontextprotocol/sdk@1",), ALL, "js"),
    Client("fastmcp", "fastmcp", ("fastmcp",)),
    Client("openai-agents", "openai-agents", ("openai-agents",)),
    Client(
        "langchain-mcp-adapters",
        "langchain-mcp-adapters",
        ("langchain-mcp-adapters", "langchain", "langchain-openai"),
    ),
    Client("pydantic-ai", "pydantic-ai", ("pydantic-ai-slim[mcp,openai]",)),
    Client("decathlon-client", "decathlon_client", (str(REPOSITORY),), ("task",)),
    Client("inspect-ai", "inspect-ai", ("inspect-ai", "openai", str(REPOSITORY)), ("task",)),
)


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    state = tmp_path_factory.mktemp("state")
    async with serving(state, suite=("starter",), provider="local") as served:
        yield served


@pytest.fixture(scope="module")
def model() -> Iterator[dict[str, str]]:
    """The variables by which a client finds the model."""
    with stand_in() as url:
        yield {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


def _sandboxes(served: Served) -> int:
    """How many there have been."""
    return len(list(served.state.glob("episodes/*")))


async def _gone(served: Served, but: Collection[Episode]) -> None:
    """The session's end was its episode's."""
    with anyio.fail_after(GONE_SECONDS):
        for episode in set(served.episodes.live).difference(but):
            await episode.state.reach(Phase.ENDED)


async def _installed(client: Client, folder: Path) -> Sequence[str | Path]:
    """What runs its program, in an environment of its own."""
    if client.language == "js":
        await anyio.to_thread.run_sync(run_npm, folder, "install", "--no-audit", "--no-fund", *client.wants)
        return [node()]
    return [await _python_with(folder, *client.wants)]


async def _python_with(folder: Path, *packages: str) -> Path:
    python = folder / "venv" / "bin" / "python"
    with anyio.fail_after(INSTALL_SECONDS):
        await anyio.run_process([sys.executable, "-m", "venv", str(folder / "venv")])
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        await anyio.run_process([*install, *packages])
    return python


@pytest.mark.timeout(INSTALL_SECONDS * 2)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: f"{client.page}-{client.heading}")
async def test_the_program_plays_to_its_reward_in_one_sandbox(
    client: Client, served: Served, model: dict[str, str], tmp_path: Path
) -> None:
    runs = await _installed(client, tmp_path)
    for way in client.ways:
        before, alive = _sandboxes(served), set(served.episodes.live)
        async with Decathlon(served.url) as d:
            handle = (await d.ask("start_episode", {"task": TASK})).structured if way == "episode" else None
            program = client.in_lobby() if way == "lobby" else client.program()
            if handle is not None:
                program = replace(
                    program, text=program.text.replace(AT_TASK, f"{SERVER}/episodes/{handle['episode']}/mcp")
                )
            said = await run(program, runs, url=served.url, folder=tmp_path, environment=model)
            assert said.splitlines()[-1].strip() in ("1.0", "1"), way
            if handle is not None:
                await d.ask("close_episode", {"episode": handle["episode"]})
        assert _sandboxes(served) == before + 1, way
        if way == "task":
            await _gone(served, alive)


async def test_the_inspector_plays_to_its_reward(served: Served, tmp_path: Path) -> None:
    npx = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    (tmp_path / "node").symlink_to(node())
    (tmp_path / "npx").write_text(f'#!/bin/sh\nexec node "{npx}" --yes "$@"\n')
    (tmp_path / "npx").chmod(0o755)
    await _plays(served, "inspector", "The Inspector", tmp_path, tmp_path)


@pytest.mark.timeout(INSTALL_SECONDS * 2)
async def test_mcp_cli_plays_to_its_reward(served: Served, tmp_path: Path) -> None:
    python = await _python_with(tmp_path, "mcp-cli")
    await _plays(served, "mcp-cli", "mcp-cli", python.parent, tmp_path)


async def test_a_shell_plays_to_its_reward(served: Served, tmp_path: Path) -> None:
    await _plays(served, "shell", "A shell", Path(sys.executable).parent, tmp_path)


async def _plays(served: Served, page: str, heading: str, programs: Path, folder: Path) -> None:
    """A page's program of a shell, with these programs on the PATH."""
    before = _sandboxes(served)
    environment = {"PATH": f"{programs}:{with_node()['PATH'] if page == 'inspector' else os.environ['PATH']}"}
    program = block(f"docs/clients/{page}.md", heading, "bash")
    said = await run(program, ["bash"], url=served.url, folder=folder, environment=environment)
    assert re.search(r'"reward": 1\b|Reward 1\.0', said)
    assert _sandboxes(served) == before + 1
