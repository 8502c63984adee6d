"""Attacks on the driver by agents in copies of a saved sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.plugins.audit.attacks import named
from tests.branches.starting import is_exact
from tests.cheats import test_driver_connection as on_the_driver
from tests.cheats import test_secrets
from tests.cheats.agent import (
    LOW_LIMITS,
    SOLUTIONS,
    SUITE,
    Agent,
    CheatServer,
    cheat_server,
    open_episode,
)
from tests.disks import small_disk
from tests.probe.clients import connected
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.long]

Attack = Callable[[CheatServer], Coroutine[Any, Any, None]]


@asynccontextmanager
async def open_copy(served: Served, original: Agent) -> AsyncGenerator[Agent]:
    """Start an episode whose sandbox is a copy of the original's, as it is now."""
    async with connected(served.lobby) as lobby:
        saved: Any = await lobby.call_tool("snapshot_episode", {"episode": original.episode_id})
        branch = {"branch_of": original.episode_id, "at": saved.structured_content["at"]}
        started: Any = await lobby.call_tool("start_episode", branch)
        handle = started.structured_content["episode"]
        try:
            async with connected(served.episode(handle)) as client:
                yield Agent(client, handle)
        finally:
            await lobby.call_tool("close_episode", {"episode": handle})
    assert is_exact(served.find(handle))


def in_copies(server: CheatServer, original: Agent) -> CheatServer:
    """The server, with cheats that play in copies of the original."""

    def open_(served: Served, task: str) -> AbstractAsyncContextManager[Agent]:
        return open_copy(served, original)

    return replace(server, open=open_)


@pytest.fixture(scope="module", name="copies")
async def server_of_copies(
    runsc: str, unpacked_image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[CheatServer]:
    """A server whose cheats play in copies of one episode."""
    state = tmp_path_factory.mktemp("state")
    settings: dict[str, Any] = {"provider": "host", "kernel": "gvisor", "image": unpacked_image}
    async with (
        serving(state, suite=(SUITE,), **settings, **LOW_LIMITS) as served,
        cheat_server(served) as server,
        open_episode(served, "sum-prices") as original,
    ):
        assert await original.echo("original") == "original"
        yield in_copies(server, original)


def attacks() -> dict[str, Attack]:
    functions = {name: value for name, value in vars(on_the_driver).items() if name.startswith("test_")}
    last = test_secrets.test_memory_and_descriptors_of_the_driver_are_inaccessible
    return {**functions, last.__name__: last}


@pytest.mark.parametrize("attack", attacks().values(), ids=attacks())
async def test_attack_on_the_driver_fails_in_a_copy(copies: CheatServer, attack: Attack) -> None:
    await attack(copies)


ATTACK_FOR_EVER = f"""
import contextlib, os, time
if os.fork() == 0:
    os.setsid()
    with open("attacks", "w", 1) as output, contextlib.redirect_stdout(output):
        while not os.path.exists("enough"):
            exec({named("driver-connection")["driver-connection"].program!r}, {{}})
            print("again")
            time.sleep(0.02)
"""


async def counts(agent: Agent) -> list[int]:
    """How often a thread was found, and how often all else was tried."""
    return [int(line) for line in (await agent.shell("grep -c thread found; grep -c again attacks")).split()]


async def test_attacks_that_go_on_while_a_copy_is_opened_fail_in_it(copies: CheatServer) -> None:
    """They run at every moment, also before the copy's driver has a server."""
    async with open_episode(copies.served, "sum-prices") as original:
        await original.python(on_the_driver.WATCH_THREADS)
        await original.python(ATTACK_FOR_EVER)
        async with in_copies(copies, original).unrewarded_episode() as agent:
            # What is there already is the original's.
            before = await counts(agent)
            await on_the_driver.start_threads(agent, 5)
            assert all(now > then for now, then in zip(await counts(agent), before, strict=True))
            await agent.shell("touch enough")
            assert "opened host:" not in await agent.shell("cat found")
            assert await agent.shell("sort -u attacks") == "again\n"
            assert await agent.echo("alive") == "alive"
        assert await original.echo("alive") == "alive"


FILL_SANDBOX = """
import os, time
for file in ("/dev/shm/x", "/tmp/x", "/episode/x"):
    with open(file, "wb") as content:
        content.write(os.urandom(30 << 20))
if os.fork() == 0:
    os.setsid()
    for descriptor in range(3):
        os.close(descriptor)
    kept = os.urandom(80 << 20)
    time.sleep(1000)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A file system in memory that one sandbox could fill."""
    with small_disk(tmp_path, 150) as folder:
        yield folder


async def test_saving_a_full_sandbox_does_not_fill_the_disk(
    runsc: str, unpacked_image: str, disk: Path
) -> None:
    """A full disk would end the attempt of a neighbour, whose calls could not be written."""
    settings: dict[str, Any] = {
        "provider": "host",
        "kernel": "gvisor",
        "image": unpacked_image,
        "min_free_mib": 32,
    }
    async with (
        serving(disk, suite=(SUITE,), **settings, **LOW_LIMITS) as served,
        open_episode(served, "sum-prices") as honest,
        connected(served.lobby) as lobby,
    ):
        start = {"task": "sum-prices", "snapshots": 1}
        started: Any = await lobby.call_tool("start_episode", start)
        handle = started.structured_content["episode"]
        async with connected(served.episode(handle)) as client, anyio.create_task_group() as tasks:
            agent = Agent(client, handle)
            await agent.python(FILL_SANDBOX)

            async def play() -> None:
                while True:
                    assert await honest.echo("still open") == "still open"

            tasks.start_soon(play)
            for _ in range(5):
                await agent.echo("save me")
            tasks.cancel_scope.cancel()
        await honest.shell(SOLUTIONS["sum-prices"])
        verdict = await honest.verdict()
        assert (verdict["reward"], verdict["truncated"]) == (1.0, False)
