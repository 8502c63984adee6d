"""`tool_decathlon`: the environment that starts its own server, and that server's life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from decathlon_client import ClientError
from decathlon_client.local_server import find_program, options, server_of_this_process
from tool_decathlon import ToolDecathlonEnv

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


async def test_a_draw_is_a_runnable_task_and_a_seed_repeats_it(served: Served) -> None:
    draws: list[list[str]] = []
    for _ in range(2):
        async with ToolDecathlonEnv(url=served.url, seed=7) as env:
            drawn = [env.sample() for _ in range(20)]
            assert all(task.runnable for task in drawn)
            draws.append([task.id for task in drawn])
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1


async def test_a_draw_that_no_task_fits_says_why(served: Served) -> None:
    async with ToolDecathlonEnv(url=served.url) as env:
        with pytest.raises(ValueError, match=r"no task is in the split 'trian'; splits: "):
            env.sample("trian")
        with pytest.raises(ValueError, match=r"pass rate from 0.2 to 0.8; 0 of \d+ have one"):
            env.sample(min_pass_rate=0.2, max_pass_rate=0.8)
    with pytest.raises(RuntimeError, match="async with"):
        env.sample()


async def test_settings_beside_a_url_are_refused(served: Served) -> None:
    with pytest.raises(TypeError, match="the one at `url` runs"):
        ToolDecathlonEnv(url=served.url, max_sandboxes=3)


def test_importing_the_package_loads_neither_verifiers_nor_the_server() -> None:
    program = (
        "import sys, tool_decathlon; tool_decathlon.ToolDecathlonEnv; "
        "print([n for n in ('verifiers', 'decathlon_mcp', 'docker') if n in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(ClientError, match=r"no program '/nowhere/decathlon-mcp'.*server='server/bin/"):
        find_program("/nowhere/decathlon-mcp")


def test_settings_become_options_of_serve() -> None:
    words = options(
        ["starter", "x"], {"max_sandboxes": 4, "merge_pages": True, "hand_over": False, "image": None}
    )
    assert words == [
        "--suite",
        "starter",
        "--suite",
        "x",
        "--max-sandboxes",
        "4",
        "--merge-pages",
        "--no-hand-over",
    ]
    with pytest.raises(TypeError, match="labels: a text, a number or a bool"):
        options([], {"labels": {}})


def test_a_server_that_does_not_start_shows_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"the server ended with status 1: .*nowhere"):
        server_of_this_process(PROGRAM, [str(tmp_path / "nowhere")], {"state": tmp_path / "state"})


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
@pytest.mark.parametrize("number", [signal.SIGKILL, None])
async def test_the_server_of_a_process_ends_with_it(
    parent: subprocess.Popen[str], number: int | None, tmp_path: Path
) -> None:
    assert parent.stdout is not None
    assert parent.stdin is not None
    first, second = (await anyio.to_thread.run_sync(parent.stdout.readline)).split()
    assert first == second
    assert await answers(first)
    if number is None:
        parent.stdin.close()
    else:
        os.kill(parent.pid, number)
    while await answers(first):  # noqa: ASYNC110  (another process ends, which tells nobody)
        await anyio.sleep(0.1)
    while list((tmp_path / "tmp").glob("decathlon-server-*")):  # noqa: ASYNC110
        await anyio.sleep(0.1)


@pytest.mark.slow
async def test_two_of_them_share_a_state_folder(settings: dict[str, Any]) -> None:
    async with (
        ToolDecathlonEnv(SUITE, server=PROGRAM, **settings) as one,
        ToolDecathlonEnv(SUITE, server=PROGRAM, **settings) as other,
    ):
        assert await play(one) == await play(other) == 1.0
