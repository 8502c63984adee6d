"""`serve`: announcing that it is ready, errors at the start, and shutdown."""

from __future__ import annotations

import hashlib
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_client import AccessDeniedError, Decathlon

from tests.cli.conftest import COMMAND
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready, and what it has printed on stderr until then."""

    process: Process
    url: str
    log: list[str]
    state: Path


@asynccontextmanager
async def start_server(shell: Shell, *arguments: str) -> AsyncGenerator[RunningServer]:
    state = shell.folder / "state"
    options = ["--suite", SUITE, "--provider", "host", "--port", "0", "--state", str(state), *arguments]
    async with await anyio.open_process(
        [*COMMAND, "serve", *options], stdin=subprocess.DEVNULL, env=shell.environment, cwd=shell.folder
    ) as process:
        assert process.stderr is not None
        stderr, log = BufferedByteReceiveStream(process.stderr), list[str]()
        last = "listening" if "json" in arguments else "Ctrl-C"
        while not log or last not in log[-1]:
            log.append((await stderr.receive_until(b"\n", 1 << 16)).decode() + "\n")
        url = re.search(r"http://[\d.:]+", "".join(log))
        assert url is not None
        try:
            yield RunningServer(process, url[0], log, state)
        finally:
            if process.returncode is None:
                process.terminate()
                with anyio.CancelScope(shield=True):
                    await process.wait()


async def test_the_banner_shows_addresses_and_tasks(shell: Shell) -> None:
    async with start_server(shell) as server:
        output = "".join(server.log)
        url = server.url
        assert f"the lobby   {url}/mcp\n" in output
        assert f"a task      {url}/tasks/crashing-verdict/mcp\n" in output
        assert "11 of 11 can run here: probe (host)\n" in output
        async with Decathlon(url) as d:
            assert len(await d.tasks(prompts=False)) == 11


@pytest.mark.long
async def test_doctor_takes_a_running_server_at_the_address_for_ready(shell: Shell) -> None:
    async with start_server(shell) as server:
        port = server.url.rpartition(":")[2]
        done = await anyio.to_thread.run_sync(shell.run, "doctor", "--port", port)
    assert done.returncode == 0, done.stdout
    assert f"ok  server: a decathlon-mcp server listens at 127.0.0.1:{port} already (state: " in done.stdout
    assert done.stdout.endswith("\nReady: a server is running\n")


@pytest.mark.long
async def test_the_ready_file_exists_while_the_server_runs(shell: Shell) -> None:
    ready = shell.folder / "ready"
    ready.write_text("http://127.0.0.1:1\n")
    async with start_server(shell, "--ready-file", str(ready)) as server:
        assert ready.read_text() == f"{server.url}\n"
        server.process.terminate()
        assert await server.process.wait() == 0
    assert not ready.exists()


async def test_sigterm_ends_the_server_and_its_episodes(shell: Shell) -> None:
    async with start_server(shell) as server:
        async with Decathlon(server.url) as d, d.episode("find-answer") as e:
            await e.call("probe__shell", {"command": "setsid sleep 1000 >/dev/null 2>&1 &"})
            server.process.send_signal(signal.SIGTERM)
            assert await server.process.wait() == 0
        assert processes_marked(server.state) == []


async def test_a_new_token_gives_access_to_the_server(shell: Shell) -> None:
    created = shell.run("token", "alice")
    (shell.folder / "tokens").write_text(created.stdout)
    secret = next(line.strip() for line in created.stderr.splitlines() if line.startswith("  "))
    async with start_server(shell, "--tokens", "tokens") as server:
        url = server.url
        with pytest.raises(AccessDeniedError):
            async with Decathlon(url):
                pass
        async with Decathlon(url, token=secret) as d:
            assert await d.tasks(prompts=False)


def test_a_tokens_secret_can_go_to_a_new_file(shell: Shell) -> None:
    created = shell.run("token", "alice", "--secret", "secret")
    file = shell.folder / "secret"
    secret = file.read_text().strip()
    assert hashlib.sha256(secret.encode()).hexdigest() in created.stdout
    assert secret not in created.stdout + created.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert "File exists; name a file that does not exist yet" in shell.error(
        "token", "alice", "--secret", "secret", status=2
    )
    assert file.read_text().strip() == secret


async def test_a_missing_engine_is_reported_quickly_with_a_cure(shell: Shell) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = shell.error(
        "serve", "--port", "0", "--provider", "docker", status=1, DOCKER_HOST="unix:///nowhere"
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, because elapsed time would depend on what else this machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
    assert "no Docker engine answers at unix:///nowhere" in output
    assert "DOCKER_HOST" in output


async def test_a_port_in_use_is_an_error(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = shell.error("serve", "--port", str(port), status=1)
    assert output == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"


async def test_an_address_beyond_loopback_requires_tokens(shell: Shell) -> None:
    assert "give --tokens FILE" in shell.error("serve", "--host", "0.0.0.0", "--port", "0", status=1)


async def test_an_invalid_line_of_the_tokens_file_is_named(shell: Shell) -> None:
    (shell.folder / "tokens").write_text("# mine\nalice secret player\n")
    output = shell.error("serve", "--tokens", "tokens", "--port", "0", status=1)
    assert output.startswith("tokens:2: expected NAME SHA256 ROLE")


@pytest.mark.long
async def test_a_ready_file_that_cannot_be_written_is_an_error(shell: Shell) -> None:
    output = shell.error("serve", "--port", "0", "--ready-file", "no/where", status=1)
    assert output == "--ready-file: no/where: No such file or directory"


INTERRUPTS = {
    "imports": """
class Interrupt:
    def find_spec(name, *_):
        if name == "decathlon_mcp.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
""",
    # The last step before uvicorn's own startup.
    "start": """
from decathlon_mcp.plugins.page import application
create_page = application.create_page
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return create_page(*arguments)
application.create_page = interrupted
""",
}


@pytest.mark.parametrize("moment", INTERRUPTS)
def test_an_interrupt_before_the_server_is_ready_prints_nothing(shell: Shell, moment: str) -> None:
    program = f"import os, signal, sys{INTERRUPTS[moment]}from decathlon_mcp.cli import main\nmain()"
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        "--no-supervisor",
        "--port",
        "0",
        "--isolation",
        "none",
    ]
    done = subprocess.run(
        command,
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
