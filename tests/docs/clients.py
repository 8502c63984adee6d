"""The programs of `docs/clients.md`, each with its real library in an environment of its own.

Not part of the normal test run, because it installs gigabytes. To run it:

    python -m pytest tests/docs/clients.py

Each program runs in an empty folder and home, with the model's address and what its section exports,
and nothing else. A network guard refuses and records what it sends beyond loopback: nothing is expected.

Each program runs as printed, at a task's address, and again at an episode's own address. If the client keeps
a session, it also runs in the lobby, changed as the page says. Each run must use exactly one sandbox. Clients
that need a model get a scripted one (`decathlon_client.testing`), which plays the task's reference solution.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import pytest
from decathlon_client.testing import scripted_model

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.starter import oracle
from tests.conformance.suites import environment as node_environment
from tests.conformance.suites import node, run_npm
from tests.docs.pages import REPOSITORY, SERVER, Block, block, exports, rows
from tests.docs.snippets import INSTALL_SECONDS, install, run
from tests.network_guard import NetworkGuard
from tests.probe.clients import start
from tests.probe.serving import Served, module_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

END_SECONDS = 60
PAGE = "docs/clients.md"
TASK = "tune-reactor"
TASK_ADDRESS = f"{SERVER}/tasks/{TASK}/mcp"
LIST_TOOLS = re.compile(r"list_?tools\(", re.IGNORECASE)

Address = Literal["task", "episode", "lobby"]
ALL_ADDRESSES: tuple[Address, ...] = ("task", "episode", "lobby")
WITHOUT_LOBBY: tuple[Address, ...] = ("task", "episode")


@dataclass(frozen=True, slots=True)
class Client:
    """A client's heading on the page, the packages it needs, the addresses it can connect to."""

    heading: str
    packages: tuple[str, ...]
    addresses: tuple[Address, ...] = WITHOUT_LOBBY
    language: Literal["python", "js"] = "python"
    npm: tuple[str, ...] = ()
    """Packages of npm that a Python program starts with `npx`."""
    ends_session: bool = True
    """Whether it sends a DELETE; otherwise its episode ends after the server's grace."""
    sessions: int = 1
    """How many it opens at a task's address, each with a sandbox."""

    def program(self) -> Block:
        return block(PAGE, self.heading, self.language)

    def in_lobby(self) -> Block:
        """The program with the changes that the page describes under "In the lobby"."""
        program = self.program()
        ((address, start),) = (
            (cells[1].strip("`"), cells[2].strip("`"))
            for cells in rows(REPOSITORY / PAGE, "In the lobby")
            if cells[0] == self.heading
        )
        lines = program.text.replace(f'"{TASK_ADDRESS}"', address).splitlines(keepends=True)
        index = next(number for number, line in enumerate(lines) if LIST_TOOLS.search(line))
        indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        return replace(program, text="".join([*lines[:index], f"{indent}{start}\n", *lines[index:]]))


OURS = str(REPOSITORY)
LLAMA = ("llama-index-core", "llama-index-tools-mcp", "llama-index-llms-openai")
CLIENTS = (
    Client("Python SDK 1.x", ("mcp>=1.24,<2",), ALL_ADDRESSES),
    Client("Python SDK 2.x", ("mcp>=2,<3",), ALL_ADDRESSES),
    Client("TypeScript SDK 2.x", ("@modelcontextprotocol/client@2",), ALL_ADDRESSES, "js"),
    Client("TypeScript SDK 1.x", ("@modelcontextprotocol/sdk@1",), ALL_ADDRESSES, "js"),
    Client("fastmcp", ("fastmcp",)),
    Client("openai-agents", ("openai-agents",)),
    Client("langchain-mcp-adapters", ("langchain-mcp-adapters", "langchain", "langchain-openai")),
    Client("pydantic-ai", ("pydantic-ai-slim[mcp,openai]",)),
    Client("decathlon_client", (OURS,), ("task",)),
    Client("inspect-ai", ("inspect-ai", "openai", OURS), ("task",)),
    Client("mcp-use", ("mcp-use", "langchain-openai")),
    Client("strands", ("strands-agents[openai]", "mcp>=2")),
    Client("autogen", ("autogen-agentchat", "autogen-ext[mcp,openai]", "mcp<2")),
    Client("Vercel's AI SDK", ("ai", "@ai-sdk/mcp", "@ai-sdk/openai"), language="js"),
    Client("Mastra", ("@mastra/core", "@mastra/mcp"), language="js", ends_session=False),
    Client("mcp-remote", ("mcp>=2,<3",), npm=("mcp-remote",), ends_session=False, sessions=2),
    Client("google-adk", ("google-adk[mcp]", "litellm", OURS), ("task",)),
    Client("semantic-kernel", ("semantic-kernel[mcp]", OURS), ("task",)),
    Client("crewai-tools", ("crewai", "crewai-tools[mcp]", OURS), ("task",)),
    Client("smolagents", ("smolagents[mcp,openai]", "mcp[ws]<2", OURS), ("task",)),
    Client("llama-index", (*LLAMA, OURS), ("task",)),
)


served = module_server(suite=("starter",), provider="host", isolation="auto")


@pytest.fixture(scope="module")
def model() -> Iterator[dict[str, str]]:
    """The environment variables that make a client use the scripted model."""
    with scripted_model(oracle(TASK)) as url:
        yield {
            name: url if name == "OPENAI_BASE_URL" else value
            for name, value in exports(PAGE, "Addresses, models, tokens").items()
        }


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> NetworkGuard:
    return NetworkGuard.compile(tmp_path_factory.mktemp("guard"))


def _count_sandboxes(served: Served) -> int:
    return len(list(served.state.glob("episodes/*")))


async def _install(client: Client, folder: Path) -> Sequence[str | Path]:
    """Install the client's packages in `folder`. Returns the interpreter for its program."""
    npm = client.packages if client.language == "js" else client.npm
    if npm:
        await anyio.to_thread.run_sync(run_npm, folder, "install", "--no-audit", "--no-fund", *npm)
        _add_npx(folder)
    if client.language == "js":
        return [node()]
    return [await install(folder, *client.packages) / "python"]


def _add_npx(folder: Path) -> None:
    """Put the programs `node` and `npx` into the folder."""
    npx = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    (folder / "node").symlink_to(node())
    (folder / "npx").write_text(f'#!/bin/sh\nexec node "{npx}" --yes "$@"\n')
    (folder / "npx").chmod(0o755)


@pytest.mark.timeout(INSTALL_SECONDS * 2)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.heading)
async def test_program_gets_the_reward_in_one_sandbox(
    client: Client, served: Served, model: dict[str, str], guard: NetworkGuard, tmp_path: Path
) -> None:
    interpreter = await _install(client, tmp_path)
    (tmp_path / "home").mkdir()
    environment = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **model,
        **exports(PAGE, client.heading),
        **guard.environment,
    }
    for address in client.addresses:
        before, live = _count_sandboxes(served), set(served.episodes.live)
        program = client.in_lobby() if address == "lobby" else client.program()
        handle = (await start(served, TASK))["episode"] if address == "episode" else None
        if handle is not None:
            text = program.text.replace(TASK_ADDRESS, f"{SERVER}/episodes/{handle}/mcp")
            program = replace(program, text=text)
        output = await run(program, interpreter, url=served.url, folder=tmp_path, environment=environment)
        assert output.splitlines()[-1].strip() in ("1.0", "1"), address
        assert not guard.take_attempts(), address
        if handle is not None:
            served.find(handle).close()
        assert _count_sandboxes(served) == before + (client.sessions if address == "task" else 1), address
        if address == "task" and client.ends_session:
            # The client's session is the episode, and ends with the program.
            with anyio.fail_after(END_SECONDS):
                for episode in set(served.episodes.live) - live:
                    await episode.state.reach(Phase.ENDED)


@pytest.mark.timeout(INSTALL_SECONDS * 2)
@pytest.mark.parametrize("heading", ["The Inspector", "mcp-cli", "A shell"])
async def test_shell_program_gets_the_reward(heading: str, served: Served, tmp_path: Path) -> None:
    """With the folder of its program first on the PATH."""
    programs, path = Path(sys.executable).parent, os.environ["PATH"]
    if heading == "The Inspector":
        _add_npx(tmp_path)
        programs, path = tmp_path, node_environment()["PATH"]
    elif heading == "mcp-cli":
        programs = await install(tmp_path, "mcp-cli")
    before = _count_sandboxes(served)
    program, environment = block(PAGE, heading, "bash"), {"PATH": f"{programs}:{path}"}
    output = await run(program, ["bash"], url=served.url, folder=tmp_path, environment=environment)
    assert re.search(r'"reward": 1\b|Reward 1\.0', output)
    assert _count_sandboxes(served) == before + 1
