"""An agent with a root shell that plays an episode through MCP, and the server of its episode."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
from mcp import Client

from decathlon_mcp.plugins.audit.attacks import Attack, named, shell_command
from decathlon_mcp.plugins.conformance import file_copies
from decathlon_mcp.plugins.preload.preloads import Preloads
from decathlon_mcp.types import public_id
from tests.probe.clients import connected
from tests.probe.serving import Served

SUITE = str(Path(__file__).parent / "suite")
LOW_LIMITS: dict[str, Any] = {"memory_mib": 256, "pids": 128, "workspace_mib": 64}
"""Limits low enough for a test to reach."""

SOLUTIONS: dict[str, str] = {
    "sealed-answer": "sha256sum seed.txt | cut -c 1-64 > answer.txt",
    "sum-prices": """echo '{"total": 70}' > report.json""",
    "read-table": """python3 -c 'import openpyxl
book = openpyxl.Workbook(); book.active["A1"] = 70; book.save("table.xlsx")'""",
    "tag-release": "git init -q library && cd library && git config user.email a@b && git config user.name a"
    " && echo 1.4 > version && git add version && git commit -qm 'release 1.4'",
    "run-program": "echo 'print(int(input()) * 2)' > double.py",
    "read-files": """echo '{"total": 70}' > total.json; echo 70 > total.csv; echo '<a>70</a>' > total.xml""",
    "last-words": "",
}
"""Commands that solve each task."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Plays one episode through MCP."""

    client: Client
    episode_id: str

    @property
    def public_id(self) -> str:
        """The id in the names of the episode's sandboxes."""
        return public_id(self.episode_id)

    async def echo(self, text: str) -> str:
        """Call a tool that returns its argument."""
        return await self._text("root__say", text=text)

    async def shell(self, command: str) -> str:
        """Run a bash command; returns stdout and stderr."""
        return await self._text("root__shell", command=command)

    async def python(self, code: str) -> str:
        """Run a Python program; returns stdout and stderr."""
        return await self._text("root__python", code=code)

    async def attack(self, attack: Attack | str, task: str = "sum-prices", **options: Any) -> str:
        """Carry out an attack that the audit knows, or the one with this name; see `shell_command`."""
        if isinstance(attack, str):
            (attack,) = named(attack).values()
        options = {"outputs": (), "task": f"/episode/tasks/cheats/{task}", **options}
        return await self.shell(
            shell_command(attack, root="/episode", workspace="/episode/workspace", **options)
        )

    async def claim(self, answer: str | None = None) -> str:
        return await self._text("claim_done", **({} if answer is None else {"answer": answer}))

    async def verdict(self) -> dict[str, Any]:
        """Evaluate the attempt and return the verdict. This also claims the attempt."""
        return (await self.client.call_tool("evaluate", {})).structured_content or {}

    async def _text(self, tool: str, **arguments: str) -> str:
        content: Any = (await self.client.call_tool(tool, arguments)).content[0]
        return content.text


OpenEpisode = Callable[[Served, str], AbstractAsyncContextManager[Agent]]
"""Starts an episode of a task; see `open_episode`."""


@dataclass(frozen=True, slots=True)
class CheatServer:
    """A server with a second, honest agent, the bystander. No cheat may affect it."""

    served: Served
    bystander: Agent
    open: OpenEpisode
    """How the episodes of the cheats start."""

    def episode(self, task: str) -> AbstractAsyncContextManager[Agent]:
        return self.open(self.served, task)

    @asynccontextmanager
    async def unrewarded_episode(
        self, task: str = "sum-prices", *, status: str = "scored", or_forfeited: bool = False
    ) -> AsyncGenerator[Agent]:
        """Start an episode without honest work. On exit, check that its reward is 0, with this status.

        `or_forfeited`: that status is right too. Also check that the bystander can still play.
        """
        async with self.episode(task) as agent:
            yield agent
            verdict = await agent.verdict()
        assert verdict["status"] in (status, *["forfeited"] * or_forfeited), verdict
        assert verdict.get("reward") == 0.0, verdict
        assert await self.bystander.echo("well") == "well"


STATES = {
    **file_copies.STATES,
    **{f"link-to-{name}": f"os.symlink({link!a}, name)" for name, link in file_copies.LINK_TARGETS.items()},
}
"""Statements that make the workspace something else than a folder, see `file_copies.MAKE_STATES`."""
AT_ONCE = 4
"""Episodes of one test that are played at the same time."""


async def replace_workspaces(served: Served, states: Mapping[str, str] = STATES) -> None:
    """Replace the workspace by each of `states`, in an episode of its own.

    Each is graded as an empty workspace, and an honest one next to them keeps its files.
    """
    places = anyio.CapacityLimiter(AT_ONCE)

    async def replace(state: str, statements: str) -> None:
        async with places, open_episode(served, "sum-prices") as agent:
            printed = await agent.python(
                f"{file_copies.MAKE_STATES}\nimport shutil\nos.chdir('..')\nshutil.rmtree('workspace')\n"
                f"make('workspace', {statements!a})"
            )
            assert not printed, (state, printed)
            verdict = await agent.verdict()
        assert (verdict["status"], verdict["reward"]) == ("scored", 0.0), (state, verdict)
        assert not verdict.get("detail"), (state, verdict)

    async with open_episode(served, "sum-prices") as honest:
        await honest.shell(SOLUTIONS["sum-prices"])
        async with anyio.create_task_group() as tasks:
            for state, statements in states.items():
                tasks.start_soon(replace, state, statements)
        assert (await honest.verdict())["reward"] == 1.0


@asynccontextmanager
async def open_episode(served: Served, task: str) -> AsyncGenerator[Agent]:
    """Start an episode of this task."""
    async with connected(served.task(task)) as client:
        yield Agent(client, served.episodes.live[-1].id)


@asynccontextmanager
async def cheat_server(served: Served) -> AsyncGenerator[CheatServer]:
    """Add a bystander to a server. On exit, check that honest work is still rewarded.

    The check covers the bystander's episode and a new one.
    """
    async with open_episode(served, "sum-prices") as bystander:
        yield CheatServer(served, bystander, open_episode)
        async with open_episode(served, "sum-prices") as newcomer:
            for agent in (bystander, newcomer):
                await agent.shell(SOLUTIONS["sum-prices"])
                verdict = await agent.verdict()
                assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


def forked_suite(folder: Path) -> str:
    """A copy of the suite, whose server imports a library, so that it can be a fork."""
    suite = folder / "suite"
    shutil.copytree(SUITE, suite)
    definition, server = suite / "configs/mcp_servers/root.yaml", suite / "local_servers/root_server.py"
    definition.write_text(definition.read_text().replace('"-S", ', ""))
    server.write_text(server.read_text().replace("import json\n", "import json\nimport mcp.types\n", 1))
    return str(suite)


@asynccontextmanager
async def forked_cheat_server(served: Served) -> AsyncGenerator[CheatServer]:
    """As `cheat_server`, where the servers of all episodes are forks."""
    (preloads,) = (hooks for hooks in served.episodes.options.hooks if isinstance(hooks, Preloads))
    async with open_episode(served, "sum-prices") as first:
        await first.echo("learnt")
        (kind,) = preloads.kinds.values()
    with anyio.fail_after(200):
        while kind.process is None:
            assert kind.why_cold is None
            await kind.changed.wait()
    cold: list[tuple[str, ...]] = []

    @asynccontextmanager
    async def open_fork(served: Served, task: str) -> AsyncGenerator[Agent]:
        async with open_episode(served, task) as agent:
            await agent.client.list_tools()
            assert not cold
            yield agent

    def note(*reason: str) -> None:
        cold.append(reason)

    with patch.object(preloads, "note", note):
        async with cheat_server(served) as server:
            yield replace(server, open=open_fork)
