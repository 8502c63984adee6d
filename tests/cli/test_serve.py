"""`serve`: announcing that it is ready, errors at the start, and shutdown."""

from __future__ import annotations

import hashlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_client import AccessDeniedError, Decathlon

from tests.cli.conftest import COMMAND, Shell
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

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
        while not log or "Ctrl-C" not in log[-1]:
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


async def test_a_server_shows_its_addresses_takes_a_new_token_and_ends_with_its_episodes(
    shell: Shell,
) -> None:
    created = shell.run("token", "alice")
    (shell.folder / "tokens").write_text(created.stdout)
    secret = next(line.strip() for line in created.stderr.splitlines() if line.startswith("  "))
    async with start_server(shell, "--tokens", "tokens") as server:
        output, url = "".join(server.log), server.url
        assert f"the lobby   {url}/mcp\n" in output
        assert f"a task      {url}/tasks/crashing-verdict/mcp\n" in output
        assert "11 of 11 can run here: probe (host)\n" in output
        port = url.rpartition(":")[2]
        found = await anyio.to_thread.run_sync(shell.run, "doctor", "--port", port)
        assert f"listens at 127.0.0.1:{port} already" in found.stdout
        assert "another one needs a --port and a --state of its own" in found.stdout
        with pytest.raises(AccessDeniedError):
            async with Decathlon(url):
                pass
        async with Decathlon(url, token=secret) as d, d.episode("find-answer") as e:
            assert len(await d.tasks(prompts=False)) == 11
            await e.call("probe__shell", {"command": "setsid sleep 1000 >/dev/null 2>&1 &"})
            server.process.send_signal(signal.SIGTERM)
            assert await server.process.wait() == 0
        assert processes_marked(server.state) == []


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


INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(name, *_):
        if name == "decathlon_mcp.cli.command_line":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
from decathlon_mcp.cli import main
main()
"""


def test_an_interrupt_before_the_server_is_ready_prints_nothing(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "serve", "--no-supervisor", "--port", "0"],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_cannot_start_says_what_to_do(shell: Shell) -> None:
    def error(options: str, status: int = 1, **variables: str) -> str:
        return shell.error("serve", *options.split(), status=status, **variables)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
        assert error(f"--port {port}") == in_use
    assert "give --tokens FILE" in error("--host 0.0.0.0 --port 0")
    (shell.folder / "tokens").write_text("# mine\nalice secret player\n")
    assert error("--tokens tokens --port 0").startswith("tokens:2: expected NAME SHA256 ROLE")
    message = error("--port 0 --provider docker", DOCKER_HOST="unix:///nowhere")
    assert "no Docker engine answers at unix:///nowhere" in message
    assert "DOCKER_HOST" in message
    message = error("--port 0 --provider podman --provider-option socket=/nowhere/podman.sock")
    assert message.startswith("no Podman service answers at unix:///nowhere/podman.sock (No such file")
    assert "podman.socket" in message
    assert "ocker" not in message
    assert error("--port 0 --kernel gvisor", PATH=str(shell.folder)).count("install runsc of") == 1
    survival = error("--port 0 --provider host --hand-over --survive-seconds 0")
    assert survival.startswith("--hand-over requires --survive-seconds")
