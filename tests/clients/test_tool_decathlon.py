"""`tool_decathlon`: the environment that starts its own server, and that server's life."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from decathlon_client import ClientError
from decathlon_client.local_server import ChildServer, find_program, options, server_of_this_process
from tool_decathlon import ToolDecathlonEnv

from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE, Served

pytestmark = pytest.mark.anyio

PROGRAM = Path(sys.executable).parent / "decathlon-mcp"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"state": tmp_path / "state", "provider": "host", "isolation": "none", "drain_seconds": 5}


@pytest.fixture(autouse=True)
def no_server_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECATHLON_URL", raising=False)


async def play(env: ToolDecathlonEnv) -> float:
    async with env.episode("find-answer") as e:
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.claim_done("42")
        return (await e.evaluate()).reward


async def answers(url: str) -> bool:
    """Whether a server listens there."""
    host, _, port = url.rpartition("/")[2].partition(":")
    try:
        await (await anyio.connect_tcp(host, int(port))).aclose()
    except OSError:
        return False
    return True


async def test_it_runs_the_server_in_this_process(settings: dict[str, Any]) -> None:
    async with ToolDecathlonEnv(SUITE, **settings) as env:
        assert await play(env) == 1.0


async def test_it_plays_at_a_url(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ToolDecathlonEnv(url=served.url) as env:
        assert await play(env) == 1.0
    monkeypatch.setenv("DECATHLON_URL", served.url)
    async with ToolDecathlonEnv() as env:
        assert "find-answer" in {task.id for task in env.tasks}


@pytest.mark.slow
async def test_it_starts_the_program_of_another_environment_and_ends_it(settings: dict[str, Any]) -> None:
    env = ToolDecathlonEnv(SUITE, server=PROGRAM, **settings)
    async with env:
        async with env.episode("find-answer") as e:
            url = e.address.partition("/episodes/")[0]
        assert await play(env) == 1.0
    assert not await answers(url)


async def test_a_draw_that_no_task_fits_says_why(served: Served) -> None:
    async with ToolDecathlonEnv(url=served.url) as env:
        with pytest.raises(ValueError, match=r"no task is in the split 'trian'; splits: "):
            env.sample("trian")
        with pytest.raises(
            ValueError, match=r"pass rate from 0.2 to 0.8; 0 of \d+ had one .*env\.client\.sample"
        ):
            env.sample(min_pass_rate=0.2, max_pass_rate=0.8)
    with pytest.raises(RuntimeError, match="async with"):
        env.sample()


def test_settings_become_options_of_serve() -> None:
    words = options(
        ["starter", "x"], {"max_sandboxes": 4, "merge_pages": True, "hand_over": False, "image": None}
    )
    assert " ".join(words) == "--suite starter --suite x --max-sandboxes 4 --merge-pages --no-hand-over"
    assert options([], {"allowed_host": ["a", "b"]}) == ["--allowed-host", "a", "--allowed-host", "b"]
    with pytest.raises(TypeError, match="labels: a text, a number or a bool"):
        options([], {"labels": {}})
    with pytest.raises(TypeError, match="the one at `url` runs"):
        ToolDecathlonEnv(url="http://127.0.0.1:9", max_sandboxes=3)
    with pytest.raises(ClientError, match=r"no program '/nowhere/decathlon-mcp'.*server='server/bin/"):
        find_program("/nowhere/decathlon-mcp")


def test_a_server_that_does_not_start_shows_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"the server ended with status 1: .*nowhere"):
        server_of_this_process(PROGRAM, [str(tmp_path / "nowhere")], {"state": tmp_path / "state"})


def test_a_server_that_ends_without_a_word_may_be_closed_twice() -> None:
    for shares_stderr, hint in ((False, "it printed nothing"), (True, "see its output")):
        server = ChildServer(["true"], (), {}, shares_stderr=shares_stderr)
        with pytest.raises(ClientError, match=f"the server ended with status 0: {hint}"):
            server.start()
        server.close()
        server.close()


FORKS = """
import os, sys, threading, time
from decathlon_client import local_server
from decathlon_client.local_server import server_of_this_process

folder, suite = sys.argv[1:]

def start(name):
    settings = {"state": f"{folder}/{name}", "provider": "host", "isolation": "none"}
    server_of_this_process(None, (suite,), settings)

thread = threading.Thread(target=start, args=("parents",))
thread.start()
# A fork while Python itself starts a process keeps a pipe that Python waits for.
while not local_server._open:
    time.sleep(0.01)
assert local_server._starting.locked()
reading, writing = os.pipe()
alive, ends = os.pipe()
if (fork := os.fork()) == 0:
    os.close(ends)
    start("forks")
    os.write(writing, b"1")
    os.read(alive, 1)  # until its parent is gone, whatever ended it
    os._exit(0)
thread.join()
os.read(reading, 1)
for server in local_server._of_process.values():
    server.close()
os.close(ends)
os.waitpid(fork, 0)
"""
"""A process that forks while it starts a server, and closes the server while the fork lives."""


@pytest.mark.slow
async def test_a_fork_during_a_start_starts_its_own_server_and_does_not_keep_its_parents(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path), str(SUITE)]
    # Two servers start, on a machine that may have much else to do.
    with anyio.fail_after(250):
        await anyio.run_process(command)


@pytest.mark.slow
async def test_a_server_ends_if_all_children_of_its_parent_are_killed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    server = ChildServer(
        [str(PROGRAM)], (str(SUITE),), {"state": state, "provider": "host", "isolation": "none"}
    )
    try:
        await anyio.to_thread.run_sync(server.start)
        assert processes_marked(state)
        server._process.kill()  # pyright: ignore[reportPrivateUsage]
        with anyio.fail_after(60):
            while processes_marked(state):  # noqa: ASYNC110
                await anyio.sleep(0.1)
    finally:
        server.close()


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has started a server of its own and prints its URL twice."""
    program = (
        "import sys; from decathlon_client.local_server import server_of_this_process as url; "
        f"settings = {{'state': {str(tmp_path / 'state')!r}, 'provider': 'host', 'isolation': 'none'}}; "
        f"print(*(url(None, ({str(SUITE)!r},), settings) for _ in 'ab'), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow
async def test_the_server_of_a_process_ends_with_it(parent: subprocess.Popen[str], tmp_path: Path) -> None:
    assert parent.stdout is not None
    first, second = (await anyio.to_thread.run_sync(parent.stdout.readline)).split()
    assert first == second
    assert await answers(first)
    parent.kill()
    while await answers(first):  # noqa: ASYNC110  (another process ends, which tells nobody)
        await anyio.sleep(0.1)
    while list((tmp_path / "tmp").glob("decathlon-server-*")):  # noqa: ASYNC110
        await anyio.sleep(0.1)
