"""The clients' programs of `docs/clients.md`, each with the real library in an environment of its own.

Not run with the others (it installs gigabytes), but by name:

    python -m pytest tests/docs/clients.py

Where a client wants a model, one of ours stands in for it (`stand_in.py`) and plays the task's oracle.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import anyio
import pytest

from tests.conformance.suites import node
from tests.docs.pages import REPOSITORY, block
from tests.docs.snippets import run
from tests.docs.stand_in import stand_in
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

INSTALL_SECONDS = 900
CLIENTS = {
    "Python SDK 1.x": ["mcp>=1.24,<2"],
    "Python SDK 2.x": ["mcp>=2,<3"],
    "decathlon_client": [str(REPOSITORY)],
    "openai-agents": ["openai-agents"],
    "langchain-mcp-adapters": ["langchain-mcp-adapters", "langchain", "langchain-openai"],
    "pydantic-ai": ["pydantic-ai-slim[mcp,openai]"],
    "fastmcp": ["fastmcp"],
    "inspect-ai": ["inspect-ai", "openai", str(REPOSITORY)],
}


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


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_program_plays_to_its_reward(
    client: str, served: Served, model: dict[str, str], tmp_path: Path
) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    with anyio.fail_after(INSTALL_SECONDS):
        await anyio.run_process([sys.executable, "-m", "venv", str(tmp_path / "venv")])
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        await anyio.run_process([*install, *CLIENTS[client]])
    program = block("docs/clients.md", client, "python")
    said = await run(program, [python], url=served.url, folder=tmp_path, environment=model)
    assert said.splitlines()[-1].strip() == "1.0"
    assert served.episodes.live == []


async def test_the_inspector_plays_to_its_reward(served: Served, tmp_path: Path) -> None:
    npx = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    (tmp_path / "node").symlink_to(node())
    (tmp_path / "npx").write_text(f'#!/bin/sh\nexec node "{npx}" --yes "$@"\n')
    (tmp_path / "npx").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    program = block("docs/clients.md", "The Inspector", "bash")
    said = await run(program, ["bash"], url=served.url, folder=tmp_path, environment=environment)
    assert re.search(r'"reward": 1\b', said)
