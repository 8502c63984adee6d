"""Attacks on the driver by agents in copies of a saved sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.cheats import test_driver_connection as on_the_driver
from tests.cheats import test_secrets
from tests.cheats.agent import LOW_LIMITS, SUITE, Agent, CheatServer, cheat_server, open_episode
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
    assert served.find(handle).records.progress.exact


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
    settings: dict[str, Any] = {"provider": "gvisor", "image": unpacked_image, "overlong": "cut"}
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
            exec({on_the_driver.ATTACK_ON_THE_DRIVER!r}, {{}})
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
