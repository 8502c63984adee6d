"""An agent at an episode of its own: what it can do there, honestly or not, and the verdict on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client

from tests.probe.clients import connected
from tests.probe.serving import Served

SUITE = str(Path(__file__).parent / "suite")
SMALL: dict[str, Any] = {"memory_mib": 256, "pids": 128, "workspace_mib": 64}
"""Limits that a cheat reaches soon."""

HONEST: dict[str, str] = {
    "sealed-answer": "sha256sum seed.txt | cut -c 1-64 > answer.txt",
    "sum-prices": """echo '{"total": 70}' > report.json""",
    "read-table": """python3 -c 'import openpyxl
book = openpyxl.Workbook(); book.active["A1"] = 70; book.save("table.xlsx")'""",
    "tag-release": "git init -q library && cd library && git config user.email a@b && git config user.name a"
    " && echo 1.4 > version && git add version && git commit -qm 'release 1.4'",
    "run-program": "echo 'print(int(input()) * 2)' > double.py",
    "last-words": "",
}
"""What solves each of the tasks."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Plays through MCP tools and nothing else."""

    client: Client
    episode_id: str

    @property
    def label(self) -> str:
        """What its sandboxes are named after."""
        return self.episode_id[:12]

    async def say(self, text: str) -> str:
        return await self._text("root__say", text=text)

    async def shell(self, command: str) -> str:
        """What a command of bash printed, errors too."""
        return await self._text("root__shell", command=command)

    async def python(self, code: str) -> str:
        """What a program printed, errors too."""
        return await self._text("root__python", code=code)

    async def claim(self, answer: str | None = None) -> str:
        return await self._text("claim_done", **({} if answer is None else {"answer": answer}))

    async def verdict(self) -> dict[str, Any]:
        """The verdict; asking for it claims, where nobody has."""
        return (await self.client.call_tool("evaluate", {})).structured_content or {}

    async def _text(self, tool: str, **arguments: str) -> str:
        said: Any = (await self.client.call_tool(tool, arguments)).content[0]
        return said.text


@dataclass(frozen=True, slots=True)
class Arena:
    """A server, and an agent at an episode of its own who does no harm: what others do must not reach it."""

    served: Served
    neighbour: Agent

    @asynccontextmanager
    async def playing(self, task: str) -> AsyncGenerator[Agent]:
        """An episode of that task."""
        async with playing(self.served, task) as agent:
            yield agent

    @asynccontextmanager
    async def cheating(self, task: str = "sum-prices") -> AsyncGenerator[Agent]:
        """An episode in which nothing honest is done: it is scored, with nothing, and the server lives on."""
        async with playing(self.served, task) as agent:
            yield agent
            verdict = await agent.verdict()
        assert (verdict["status"], verdict.get("reward")) == ("scored", 0.0), verdict
        assert await self.neighbour.say("well") == "well"


@asynccontextmanager
async def playing(served: Served, task: str) -> AsyncGenerator[Agent]:
    """An episode of that task."""
    async with connected(served.task(task)) as client:
        yield Agent(client, served.episodes.live[-1].id)


@asynccontextmanager
async def arena(served: Served) -> AsyncGenerator[Arena]:
    """At its end the neighbour is paid for honest work, and so is a new episode: the server is as it was."""
    async with playing(served, "sum-prices") as neighbour:
        yield Arena(served, neighbour)
        async with playing(served, "sum-prices") as newcomer:
            for agent in (neighbour, newcomer):
                await agent.shell(HONEST["sum-prices"])
                verdict = await agent.verdict()
                assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict
