"""`serve`: how it says that it is up, that it cannot be, and how it ends."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_client import AccessDeniedError, Decathlon

from tests.cli.conftest import COMMAND
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up, and all it has said on stderr so far."""

    process: Process
    url: str
    log: list[str]
    state: Path


@asynccontextmanager
async def running(shell: Shell, *words: str) -> AsyncGenerator[Running]:
    state = shell.folder / "state"
    options = ["--suite", SUITE, "--provider", "local", "--port", "0", "--state", str(state), *words]
    async with await anyio.open_process(
        [*COMMAND, "serve", *options], stdin=subprocess.DEVNULL, env=shell.environment, cwd=shell.folder
    ) as process:
        assert process.stderr is not None
        stderr, log = BufferedByteReceiveStream(process.stderr), list[str]()
        last = "listening" if "json" in words else "Ctrl-C"
        while not log or last not in log[-1]:
            log.append((await stderr.receive_until(b"\n", 1 << 16)).decode() + "\n")
        url = re.search(r"http://[\d.:]+", "".join(log))
        assert url is not None
        yield Running(process, url[0], log, state)
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_it_says_where_it_listens_what_there_is_and_how_to_end_it(shell: Shell) -> None:
    async with running(shell) as server:
        said = "".join(server.log)
        url = server.url
        assert f"the lobby   {url}/mcp\n" in said
        assert f"a task      {url}/tasks/crashing-verdict/mcp\n" in said
        assert "10 of 10 can run here: probe (local)\n" in said
        async with Decathlon(url) as d:
            assert len(await d.tasks(prompts=False)) == 10


async def test_a_program_finds_the_url_in_the_log(shell: Shell) -> None:
    async with running(shell, "--log-format", "json") as server:
        told: list[dict[str, Any]] = [json.loads(line) for line in server.log]
        assert told[-1]["message"] == "listening"
        assert told[-1]["url"].startswith("http://127.0.0.1:")
        assert told[-1]["tasks"] == 10


async def test_the_ready_file_holds_the_url_while_it_is_true(shell: Shell) -> None:
    ready = shell.folder / "ready"
    ready.write_text("http://127.0.0.1:1\n")
    async with running(shell, "--ready-file", str(ready)) as server:
        assert ready.read_text() == f"{server.url}\n"
        server.process.terminate()
        assert await server.process.wait() == 0
    assert not ready.exists()


async def test_sigterm_ends_it_with_all_its_episodes(shell: Shell) -> None:
    async with running(shell) as server:
        async with Decathlon(server.url) as d, d.episode("find-answer") as e:
            await e.call("probe__shell", {"command": "setsid sleep 1000 >/dev/null 2>&1 &"})
            server.process.send_signal(signal.SIGTERM)
            assert await server.process.wait() == 0
        assert processes_marked(server.state) == []


async def test_a_token_that_was_made_opens_the_server(shell: Shell) -> None:
    made = shell.run("token", "alice")
    (shell.folder / "tokens").write_text(made.stdout)
    secret = next(line.strip() for line in made.stderr.splitlines() if line.startswith("  "))
    async with running(shell, "--tokens", "tokens") as server:
        url = server.url
        with pytest.raises(AccessDeniedError):
            async with Decathlon(url):
                pass
        async with Decathlon(url, token=secret) as d:
            assert await d.tasks(prompts=False)


async def test_a_missing_engine_is_said_at_once_and_with_a_cure(shell: Shell) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = shell.fault(
        "serve", "--port", "0", "--provider", "docker", status=1, DOCKER_HOST="unix:///nowhere"
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The time that it took would measure what else this machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
    assert "no Docker engine answers at unix:///nowhere" in said
    assert "DOCKER_HOST" in said


async def test_a_taken_port_is_said(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = shell.fault("serve", "--port", str(port), status=1)
    assert said == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"


async def test_beyond_loopback_it_wants_tokens(shell: Shell) -> None:
    assert "give --tokens FILE" in shell.fault("serve", "--host", "0.0.0.0", "--port", "0", status=1)


async def test_a_tokens_file_with_a_wrong_line_is_named_with_it(shell: Shell) -> None:
    (shell.folder / "tokens").write_text("# mine\nalice secret player\n")
    said = shell.fault("serve", "--tokens", "tokens", "--port", "0", status=1)
    assert said.startswith("tokens:2: expected NAME SHA256 ROLE")


async def test_a_ready_file_that_cannot_be_written_is_said(shell: Shell) -> None:
    said = shell.fault("serve", "--port", "0", "--ready-file", "no/where", status=1)
    assert said == "--ready-file: no/where: No such file or directory"
