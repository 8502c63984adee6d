"""A server that is killed, and the next one on its state folder: every phase of an episode."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from decathlon_client import Decathlon
from decathlon_client.client_errors import EpisodeEndedError, NoVerdictError, SandboxLostError
from mcp.shared.exceptions import MCPError

from decathlon_mcp.http.listening import listen
from decathlon_mcp.plugins.docker.exit_events import OWNER_LABEL, SANDBOX_LABEL
from decathlon_mcp.protocol.messages import OPERATION_KEY
from decathlon_mcp.sandboxes.host.plugin import PROVIDER
from decathlon_mcp.storage.store import SandboxRow, Store
from tests.driver.peer import until
from tests.probe.clients import connected
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE
from tests.survival.servers import SupervisedServer, supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ONCE = "echo ran >> runs.txt"
"""Shell command that counts its runs."""


@pytest.fixture(
    params=["host", pytest.param("docker", marks=(pytest.mark.docker, pytest.mark.long))],
)
def provider(request: pytest.FixtureRequest) -> str:
    if request.param == "docker":
        request.getfixturevalue("test_image")
    return request.param


async def assert_nothing_left(state: Path) -> None:
    """Wait until no process of the server or of its sandboxes is left, and check its folders."""
    with anyio.move_on_after(20):
        while processes_marked(state):  # noqa: ASYNC110  (processes of other parents end)
            await anyio.sleep(0.1)
    assert processes_marked(state) == []
    assert list((state / "servers").iterdir()) == []
    assert list((state / "scratch").iterdir()) == []


async def test_attempt_goes_on_after_its_server_was_killed_again_and_again(
    tmp_path: Path, provider: str
) -> None:
    """An open one, one with a call in flight, which runs once, and one that is claimed."""
    async with supervised_server(tmp_path / "state", provider=provider) as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            await server.kill()
            assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
            replies: list[str] = []

            async def call() -> None:
                command = f"{ONCE}; sleep 2; echo done; wc -l < runs.txt"
                replies.append((await episode.call("probe__shell", {"command": command})).text)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.sleep(0.5)
                await server.kill()
            assert replies == ["done\n1\n"]
            await episode.claim_done()
            server.kill_at_once()
            assert (await episode.evaluate()).reward == 1.0
    await assert_nothing_left(tmp_path / "state")


@pytest.mark.long
async def test_call_that_ended_while_no_server_ran_gets_its_reply(tmp_path: Path) -> None:
    async with supervised_server(tmp_path / "state") as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            replies: list[str] = []

            async def call() -> None:
                command = f"sleep 0.3; {ONCE}; wc -l < runs.txt"
                replies.append((await episode.call("probe__shell", {"command": command})).text)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.sleep(0.2)
                server.kill_at_once()
            assert replies == ["1\n"]


@pytest.mark.long
async def test_episode_that_was_being_set_up_starts_over(tmp_path: Path, provider: str) -> None:
    async with supervised_server(tmp_path / "state", provider=provider) as server:
        async with Decathlon(server.url) as client:
            async with anyio.create_task_group() as tasks:

                async def kill() -> None:
                    await anyio.sleep(0.4)
                    await server.kill()

                tasks.start_soon(kill)
                async with client.episode("made-answer") as episode:
                    assert (await episode.call("probe__echo", {"text": "hello"})).text == "hello"
    await assert_nothing_left(tmp_path / "state")


@pytest.mark.docker
@pytest.mark.long
async def test_sandbox_that_was_opened_ahead_is_taken_back_and_the_idle_ones_are_removed(
    tmp_path: Path, test_image: str, docker_engine: Any
) -> None:
    state = tmp_path / "state"

    async def until_one_is_idle(server: SupervisedServer) -> None:
        async with httpx2.AsyncClient() as http:
            with anyio.fail_after(60):
                text = ""
                while "\ndecathlon_pool_idle 1.0\n" not in text:
                    text = (await http.get(f"{server.url}/metrics")).text

    async with supervised_server(state, "--pool", "1", provider="docker") as server:
        await until_one_is_idle(server)
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            with Store.open_read_only(state) as store:
                assert store is not None
                (row,) = store.find(SandboxRow, episode=episode.id)
            assert row.name.startswith("pooled-")
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            await until_one_is_idle(server)
            await server.kill()
            assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
            # The next server listens when everything else of the dead one is removed.
            left = docker_engine.containers(all=True, filters={"label": f"{OWNER_LABEL}={row.owner}"})
            assert [container["Labels"][SANDBOX_LABEL] for container in left] == [row.name]
            assert (await episode.evaluate()).reward == 1.0
    assert docker_engine.containers(all=True, filters={"label": f"{OWNER_LABEL}={row.owner}"}) == []
    await assert_nothing_left(state)


@pytest.mark.long
async def test_verdict_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async with supervised_server(tmp_path / "state") as server:
        async with Decathlon(server.url) as client:
            async with client.episode("find-answer") as episode:
                await episode.claim_done()
                verdict = await episode.evaluate()
                await server.kill()
                assert await episode.evaluate() == verdict
            await server.kill()
            with pytest.raises(EpisodeEndedError, match="has ended: scored"):
                async with client.attach(episode.id):
                    pass


async def alive(state: Path) -> set[str]:
    """Names of the local sandboxes that have processes, of servers of this folder."""
    assert PROVIDER.inventory is not None
    found: set[str] = set()
    async with PROVIDER.inventory(state) as local:
        for owner in await local.owners():
            found |= {name for name, is_alive in (await local.sandboxes(owner)).items() if is_alive}
    return found


async def recoveries(server: SupervisedServer) -> dict[str, float]:
    """How many episodes the server counted as recovered, by what became of them."""
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"{server.url}/metrics")).text
    found = re.findall(r'^decathlon_episodes_recovered_total\{result="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {result: float(value) for result, value in found if float(value)}


async def test_upgrade_continues_the_episodes_whose_drivers_speak_its_wire_version(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with supervised_server(state, "--hand-over") as first:
        async with (
            Decathlon(first.url) as client,
            client.episode("find-answer") as older,
            client.episode("find-answer") as episode,
        ):
            for each in (older, episode):
                await each.call("probe__write", {"path": "answer.txt", "text": "42"})
            first.process.terminate()
            assert await first.process.wait() == 0
            assert len(await alive(state)) == 2
            # As if a server of another release had opened it.
            with closing(sqlite3.connect(state / "store.db")) as store, store:
                store.execute("UPDATE sandboxes SET wire_version = 99 WHERE episode = ?", (older.id,))
            async with supervised_server(state, port=first.port) as second:
                assert len(await alive(state)) == 1
                with pytest.raises(SandboxLostError, match="its sandbox's driver has wire version 99"):
                    await older.call("probe__read", {"path": "answer.txt"})
                assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
                assert await recoveries(second) == {"continued": 1, "ended": 1}
                assert (await episode.evaluate()).reward == 1.0
    log = (tmp_path / "state.log").read_text()
    assert log.count("an episode cannot be continued") == 1
    assert log.index("an episode cannot be continued") < log.index("continuing an episode of a server")
    await assert_nothing_left(state)


@pytest.mark.long
async def test_upgrade_with_another_isolation_leaves_no_process(tmp_path: Path, namespaces: None) -> None:
    state = tmp_path / "state"
    async with supervised_server(state, "--hand-over", "--isolation", "namespaces") as first:
        async with Decathlon(first.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__echo", {"text": ""})
            first.process.terminate()
            assert await first.process.wait() == 0
            assert len(await alive(state)) == 1
            async with supervised_server(state, "--isolation", "none", port=first.port) as second:
                assert await alive(state) == set()
                with pytest.raises(SandboxLostError, match="provider host and isolation namespaces"):
                    await episode.call("probe__echo", {"text": ""})
                assert await recoveries(second) == {"ended": 1}
    await assert_nothing_left(state)


@pytest.mark.long
async def test_sandbox_that_ends_while_no_server_runs_is_reported_as_lost(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with supervised_server(state, "--survive-seconds", "1", "--no-supervisor") as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__echo", {"text": ""})
            server.process.kill()
            await server.process.wait()
            await wait_for_no_process(state)
            async with supervised_server(state, port=server.port):
                with pytest.raises(SandboxLostError):
                    await episode.call("probe__echo", {"text": ""})
    await assert_nothing_left(state)


@pytest.mark.long
async def test_start_that_fails_leaves_the_episodes_to_the_next_one(tmp_path: Path) -> None:
    """For example because the port is in use: it has taken the sandboxes back by then."""
    state = tmp_path / "state"
    async with AsyncExitStack() as servers:
        server = await servers.enter_async_context(supervised_server(state, "--no-supervisor"))
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__write", {"path": "answer.txt", "text": "42"})
            server.process.kill()
            await server.process.wait()
            again = supervised_server(state, "--no-supervisor", port=server.port)
            with listen("127.0.0.1", server.port), pytest.raises(AssertionError, match="in use"):
                await servers.enter_async_context(again)
            again = supervised_server(state, "--no-supervisor", port=server.port)
            await servers.enter_async_context(again)
            assert (await episode.call("probe__read", {"path": "answer.txt"})).text == "42"
    await assert_nothing_left(state)


async def test_a_server_that_comes_while_the_first_stops_waits(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with supervised_server(state) as first:
        first.process.terminate()
        async with supervised_server(state) as second:
            async with Decathlon(second.url) as client, client.episode("find-answer") as episode:
                assert (await episode.call("probe__echo", {"text": "here"})).text == "here"
    await assert_nothing_left(state)


@pytest.mark.long
async def test_server_killed_during_its_recovery_loses_no_episode(tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "state.log"
    async with AsyncExitStack() as servers:
        server = await servers.enter_async_context(supervised_server(state, "--no-supervisor"))
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            await episode.call("probe__shell", {"command": ONCE})
            server.process.kill()
            await server.process.wait()
            for step in (0, 2):
                recoveries = log.read_text().count("continuing an episode")
                async with anyio.create_task_group() as tasks:
                    tasks.cancel_scope.deadline = anyio.current_time() + 60
                    tasks.start_soon(serve_until_killed, state, server.port)
                    while log.read_text().count("continuing an episode") == recoveries:  # noqa: ASYNC110
                        await anyio.sleep(0.002)
                    await anyio.sleep(0.03 * step)
                    tasks.cancel_scope.cancel()
            again = supervised_server(state, "--no-supervisor", port=server.port)
            await servers.enter_async_context(again)
            reply = await episode.call("probe__shell", {"command": "wc -l < runs.txt"})
            assert reply.text == "1\n"
    await assert_nothing_left(state)


async def serve_until_killed(state: Path, port: int) -> None:
    """Run a server without waiting until it is ready; a cancellation kills it."""
    options = ("--suite", SUITE, "--provider", "host", "--port", str(port), "--state", str(state))
    command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--no-supervisor", *options]
    with (state.parent / "state.log").open("ab") as log:
        await anyio.run_process(command, stdout=subprocess.DEVNULL, stderr=log)


async def wait_for_no_process(state: Path) -> None:
    await until(lambda: not processes_marked(state))


@pytest.mark.long
async def test_episode_whose_trajectory_is_gone_is_lost_and_repeats_no_call(tmp_path: Path) -> None:
    state, runs = tmp_path / "state", tmp_path / "runs.txt"
    obstacle = "its trajectory cannot be continued"
    # Without isolation, so that the file outlives the sandbox.
    async with supervised_server(state, "--isolation", "none") as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:

            async def call_again() -> str:
                """Send the first call, always with the same operation."""
                arguments = {"command": f"echo first >> {runs}; echo first reply"}
                async with connected(f"{server.url}/episodes/{episode.id}/mcp", "sessionless") as session:
                    meta: Any = {OPERATION_KEY: "the first"}
                    try:
                        result: Any = await session.call_tool("probe__shell", arguments, meta=meta)
                    except MCPError as error:
                        return error.error.message
                    return result.content[0].text

            async def call_until_killed() -> None:
                with pytest.raises((SandboxLostError, EpisodeEndedError), match=obstacle):
                    await episode.call("probe__shell", {"command": f"echo second >> {runs}; sleep 60"})

            assert await call_again() == "first reply\n"
            (trajectory,) = state.glob("episodes/*/trajectory.jsonl")
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call_until_killed)
                    while "second" not in runs.read_text():  # noqa: ASYNC110  (another process writes it)
                        await anyio.sleep(0.02)
                    # The next server must not start before the file is gone.
                    server.process.send_signal(signal.SIGSTOP)
                    server.kill_at_once()
                    trajectory.unlink()
                    server.process.send_signal(signal.SIGCONT)
                assert obstacle in await call_again()
            with pytest.raises(NoVerdictError, match=obstacle) as lost:
                await episode.evaluate()
            assert lost.value.status == "sandbox_lost"
        assert runs.read_text() == "first\nsecond\n"
    await assert_nothing_left(state)
