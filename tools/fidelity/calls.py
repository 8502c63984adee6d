"""Calls of the tasks' own tools, which scripted attempts are made of."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tests.probe.clients import Player, connected
from tests.probe.serving import Served
from tools.fidelity.files import Files

WORKSPACE = "/workspace/dumps/workspace"
ATTEMPTS = ("nothing", "wrong", "right")
"""One that calls no tool, one with a mistake, a correct one."""
Solution: TypeAlias = Callable[[Player, Path, str], Awaitable[None]]
"""Plays an attempt (wrong or right) at the task in this folder of the checkout."""


class LobbyPlayer(Player):
    """A client of the lobby, which starts only the servers that it calls.

    At an episode's own address the SDK lists the tools before its first call, for which all servers start.
    """

    async def call(self, name: str, **arguments: Any) -> Any:
        own = name in ("claim_done", "evaluate")
        called = {} if own else {"name": name, "arguments": arguments}
        return await self.client.call_tool(
            name if own else "call_tool", {"episode": self.episode_id, **called}
        )


@asynccontextmanager
async def playing(served: Served, task: str) -> AsyncGenerator[Player]:
    """Start an episode of this task, which ends when the context exits."""
    async with connected(served.lobby) as lobby:
        started = (await lobby.call_tool("start_episode", {"task": task})).structured_content
        assert started is not None, task
        yield LobbyPlayer(lobby, started["episode"])
        served.find(started["episode"]).close()


async def call(player: Player, tool: str, **arguments: object) -> str:
    """The text of a tool's reply. Raises AssertionError if the call failed."""
    result = await player.call(tool, **arguments)
    text = "\n".join(item.text for item in result.content)
    failed = result.is_error or text.startswith("Error")
    assert not failed, (tool, arguments, text)
    return text


async def run_python(player: Player, code: str, *, tool: str = "local__python-execute") -> str:
    """Run code in the workspace and leave nothing else there. Raises AssertionError if it fails."""
    code = f"import shutil\nshutil.rmtree('.python_tmp')\n{code}"
    output = await call(player, tool, code=code, timeout=120)
    assert "Return code: 0" in output, output
    return output


async def write_texts(player: Player, files: Files) -> None:
    """Write files with the server `filesystem`, which takes texts only."""
    for name, content in files.items():
        assert content is not None, name
        path = f"{WORKSPACE}/{name}"
        await call(player, "filesystem__write_file", path=path, content=content.decode())
