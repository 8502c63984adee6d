"""`serve` with its supervisor: real processes, killed and stopped in every order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tests.cli.conftest import COMMAND, Shell
from tests.probe.clients import connected
from tests.probe.serving import SUITE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent"),
    pytest.mark.slow,
]

WAIT_SECONDS = 60.0
"""Longest wait for anything that happens at once on a machine without load."""
ACTIVATED = """
import os, sys
listener, *command = sys.argv[1:]
descriptors = [int(number) for number in listener.split(",")]
for target, descriptor in enumerate(descriptors, 3):
    os.dup2(descriptor, target)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(descriptors)))
os.execv(command[0], command)
"""
"""Does what systemd does for a service with a socket: the descriptors 3 and up, and the variables."""
FOREGROUND = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal at descriptor 0 the controlling one, as a shell has it for the foreground process."""


@dataclass(slots=True)
class Log:
    """Reads a server's JSON log while it runs."""

    stream: IO[str]
    lines: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        with suppress(OSError):  # a terminal whose last process has gone
            for line in self.stream:
                with self.changed:
                    self.lines.append(line)
                    self.changed.notify_all()

    def records(self, message: str) -> list[dict[str, Any]]:
        """The records with this message so far."""
        found: list[dict[str, Any]] = []
        for line in list(self.lines):
            with suppress(ValueError):
                record: dict[str, Any] = json.loads(line)
                found += [record] if record.get("message") == message else []
        return found

    def wait(self, message: str, count: int = 1) -> dict[str, Any]:
        """Wait for the record with this message that has this number, from 1."""
        with self.changed:
            arrived = self.changed.wait_for(lambda: len(self.records(message)) >= count, WAIT_SECONDS)
        assert arrived, "".join(self.lines)
        return self.records(message)[count - 1]


@dataclass(frozen=True, slots=True)
class Running:
    """A supervisor with a server that is ready."""

    process: subprocess.Popen[str]
    log: Log
    state: Path
    ready: Path

    @property
    def url(self) -> str:
        return str(self.log.records("listening")[0]["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def server(self, number: int = 1) -> int:
        """The process id of the server with this number; waits until it is ready."""
        return int(self.log.wait("listening", number)["pid"])

    def health(self, wait_seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """A request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=wait_seconds)
        try:
            connection.request("GET", "/healthz")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


@contextmanager
def running(
    shell: Shell, *options: str, program: tuple[str, ...] = COMMAND, **popen: Any
) -> Generator[Running]:
    """Start `serve` by a program that takes its arguments, and kill it at the end."""
    state, ready = shell.folder / "state", shell.folder / "ready"
    flags = ["--suite", SUITE, "--provider", "host", "--state", str(state), "--ready-file", str(ready)]
    # Sandboxes that a test leaves to the next server end soon after it.
    flags += ["--survive-seconds", "5", "--log-format", "json"]
    # Without isolation a tool can write into the test's folder.
    flags += ["--isolation", "none"]
    command = [*program, "serve", *flags, *options]
    popen = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE} | popen
    process = subprocess.Popen(command, env=shell.environment, cwd=shell.folder, text=True, **popen)
    with process:
        log = Log(popen["stdin"] if process.stderr is None else process.stderr)
        reader = threading.Thread(target=log.read)
        reader.start()
        try:
            log.wait("listening")
            yield Running(process, log, state, ready)
        finally:
            process.kill()
            process.wait()
            reader.join()


def eventually(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
    """Whether the condition becomes true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(process: int) -> bool:
    """Whether the process exists and is not only waiting to be collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def holders(port: int) -> set[int]:
    """The processes that have the socket which listens on this port open."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    found: set[int] = set()
    for process in Path("/proc").iterdir():
        # A process may end while it is inspected.
        with suppress(OSError):
            if process.name.isdecimal() and any(
                str(descriptor.readlink()) in inodes for descriptor in (process / "fd").iterdir()
            ):
                found.add(int(process.name))
    return found


def test_requests_wait_while_the_server_is_dead(shell: Shell) -> None:
    with running(shell, "--port", "0", "--max-sandboxes", "1000000") as served:
        os.kill(served.server(), signal.SIGKILL)
        assert served.health()["status"] == "ok"
        problems = [served.log.wait("this machine has a problem", count)["what"] for count in (1, 2)]
        assert problems == ["kernel limits"] * 2, "each server looks at its machine"
        assert served.server(2) != served.server()
        assert served.log.records("listening")[1]["url"] == served.url
        (again,) = served.log.records("started again")
        assert (again["ended_by"], again["restarts"]) == ("SIGKILL", 1)
        assert eventually(served.ready.exists)
        assert served.ready.read_text() == f"{served.url}\n"
        served.process.terminate()
        assert served.process.wait(WAIT_SECONDS) == 0
        assert not served.ready.exists()


def test_a_killed_supervisor_takes_its_server_with_it(shell: Shell) -> None:
    with running(shell, "--port", "0") as served:
        server, port = served.server(), served.port
        served.process.kill()
        assert eventually(lambda: not is_running(server))
        # A killed process whose other threads are still ending keeps its descriptors for a moment.
        assert eventually(lambda: not holders(port))
        # The kernel closes the socket itself some time after the last descriptor.
        assert eventually(lambda: is_free(port))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.anyio
async def test_no_process_of_a_sandbox_has_the_port_open(shell: Shell) -> None:
    with running(shell, "--port", "0") as served:
        async with connected(f"{served.url}/tasks/find-answer/mcp") as client:
            await client.call_tool("probe__shell", {"command": "setsid sleep 1000 >/dev/null 2>&1 &"})
            # The supervisor's own descriptor is in a message that it reads when the server dies.
            assert holders(served.port) - {served.process.pid} == {served.server()}
        # The session's sandbox is being removed: a server that is killed now leaves it to a next one.
        served.process.terminate()
        assert served.process.wait(WAIT_SECONDS) == 0


@pytest.mark.long
@pytest.mark.anyio
async def test_ctrl_c_reaches_the_server_once_and_the_second_ends_it_at_once(shell: Shell) -> None:
    # As at a shell: the terminal's SIGINT goes to every process of the foreground group.
    keyboard, terminal = os.openpty()
    program = (sys.executable, "-c", FOREGROUND, *COMMAND)
    options = ("--port", "0", "--drain-seconds", "600")
    try:
        with running(shell, *options, program=program, stdin=terminal, start_new_session=True) as served:
            async with connected(f"{served.url}/tasks/slow-verdict/mcp") as client:
                await client.call_tool("claim_done", {})
            os.write(keyboard, b"\x03")
            served.log.wait("draining")
            assert served.health()["status"] == "draining"
            assert len(served.log.records("stopping")) == 1
            os.write(keyboard, b"\x03")
            served.log.wait("stopping", 2)
            assert served.process.wait(WAIT_SECONDS) == 0
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_requests_wait_at_the_socket_of_systemd(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = (sys.executable, "-c", ACTIVATED, str(listener.fileno()), *COMMAND)
        with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            with running(shell, program=program, pass_fds=[listener.fileno()]) as served:
                assert served.port == port
                assert early.recv(100).startswith(b"HTTP/1.1 200 ")
                assert served.server() in holders(port)


FAKE = """
import os, signal, socket, sys, time
from decathlon_mcp.cli import supervisor

if not supervisor.join():
    limits = supervisor.RestartLimits(attempts=3, pause_seconds=0.05)
    sys.exit(supervisor.supervise([sys.executable, *sys.orig_argv[1:]], limits))
supervised = supervisor.current()
print(supervised.restarts, supervised.cause, flush=True)
open("ready", "w").close()
inherited = supervised.listener
listener = socket.create_server(("127.0.0.1", 0)) if inherited is None else socket.socket(fileno=inherited)
"""
"""A supervisor and the beginning of a server whose end each test gives."""
READY = 'supervised.report_ready(listener, "ready"); '


def fake(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    """Run a supervisor whose servers end like that, until it ends."""
    return subprocess.run(
        [sys.executable, "-c", FAKE + end],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


def test_a_crash_loop_ends_with_a_message_and_the_last_status(tmp_path: Path) -> None:
    done = fake(tmp_path, READY + "sys.exit(3)")
    assert done.returncode == 3
    assert done.stdout.splitlines() == ["0 -", *(f"{number} exit status 3" for number in (1, 2, 3))]
    (line,) = done.stderr.splitlines()
    assert "the server died 4 times in a row, each before it had served for 5 s" in line
    assert "exit status 3" in line
    assert not (tmp_path / "ready").exists()


def test_a_server_is_started_again_as_long_as_its_sandboxes_wait(tmp_path: Path) -> None:
    """As while its disk is full: every start fails, and nothing tells how long that takes."""
    once = 'supervised.report_ready(listener, "ready", 5.0)\n'
    began_at = time.monotonic()
    done = fake(tmp_path, f"if not supervised.restarts: {once}sys.exit(3)")
    assert time.monotonic() - began_at >= 5.0
    assert done.returncode == 3
    assert "it is not started again" in done.stderr
    # The pauses until then are 0.05, 0.1, 0.2, ... seconds; three starts follow one another in any case.
    assert len(done.stdout.splitlines()) > 6


@pytest.mark.parametrize(
    ("end", "status", "servers"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, 1),
        (READY + "sys.exit(2 if supervised.restarts else 1)", 2, 2),
        (READY + "sys.exit(75 if supervised.restarts < 9 else 0)", 0, 10),
        (READY + "os.kill(os.getpid(), signal.SIGABRT)", 134, 4),
        (
            f"if supervised.restarts < 2: {READY}sys.exit(1)\nsys.exit(1 if supervised.restarts < 3 else 0)",
            0,
            4,
        ),
    ],
    ids=["killed, never ready", "usage", "hand-over", "abort", "ready, then not"],
)
def test_only_a_server_that_was_ready_is_started_again(
    tmp_path: Path, end: str, status: int, servers: int
) -> None:
    done = fake(tmp_path, end)
    assert done.returncode == status, done.stderr
    assert len(done.stdout.splitlines()) == servers


def test_a_signal_during_the_pause_ends_the_supervisor(tmp_path: Path) -> None:
    program = (FAKE + READY + "sys.exit(3)").replace("pause_seconds=0.05", "pause_seconds=60.0")
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["0 -\n", "1 exit status 3\n"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert eventually(lambda: children.read_text() == "")
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 3
