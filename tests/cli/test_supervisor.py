"""`serve` with its supervisor: real processes, killed and stopped in every order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from decathlon_mcp.cli import supervisor
from decathlon_mcp.http.server import GRACE_SECONDS
from tests.cli.conftest import COMMAND
from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent"),
    pytest.mark.slow,
]

PROTOCOL_VERSION = "2025-11-25"
WAIT_SECONDS = 60.0
"""Longest wait for anything that happens at once on a machine without load."""
PATIENT = """
import sys
from decathlon_mcp.cli import supervisor
limits = supervisor.RestartLimits(stable_seconds=0.0)
sys.exit(supervisor.supervise([sys.executable, "-m", "decathlon_mcp.cli", *sys.argv[1:]], limits))
"""
"""A supervisor that starts its server again at once, however often it dies."""
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
class Player:
    """A session at a task's address, each request on a connection of its own."""

    port: int
    task: str
    session: dict[str, str]

    @classmethod
    def connect(cls, port: int, task: str) -> Player:
        player = cls(port, task, {})
        info = {"name": "test", "version": "1"}
        params = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": info}
        player._post({"id": 1, "method": "initialize", "params": params})
        player._post({"method": "notifications/initialized"})
        return player

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return the whole response."""
        return self._post({"id": 2, "method": "tools/call", "params": {"name": name, "arguments": arguments}})

    def _post(self, message: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        try:
            body = json.dumps({"jsonrpc": "2.0", **message})
            connection.request("POST", f"/tasks/{self.task}/mcp", body, headers | self.session)
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status < 300, text
            if session := response.headers["Mcp-Session-Id"]:
                self.session.update({"Mcp-Session-Id": session, "Mcp-Protocol-Version": PROTOCOL_VERSION})
            return text
        finally:
            connection.close()


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


def memory_mib(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


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


@pytest.mark.long
def test_ten_servers_are_killed_and_no_request_is_lost(shell: Shell) -> None:
    program = (sys.executable, "-c", PATIENT)
    with running(shell, "--port", "0", program=program) as served:
        for number in range(1, 11):
            os.kill(served.server(number), signal.SIGKILL)
            assert served.health()["status"] == "ok"
        served.process.terminate()
        assert served.process.wait(WAIT_SECONDS) == 0


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


def test_the_supervisor_is_small_and_never_accepts(shell: Shell) -> None:
    bare = [sys.executable, "-c", "print(open('/proc/self/status').read())"]
    status = subprocess.run(bare, capture_output=True, text=True, check=True).stdout
    bare_mib = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    with running(shell, "--port", "0") as served:
        assert memory_mib(served.process.pid) < bare_mib + 6
        os.kill(served.server(), signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            served.health(0.3)
        os.kill(served.server(), signal.SIGCONT)
        assert served.health()["status"] == "ok"


def test_no_process_of_a_sandbox_has_the_port_open(shell: Shell) -> None:
    with running(shell, "--port", "0") as served:
        player = Player.connect(served.port, "find-answer")
        player.call("probe__shell", {"command": "setsid sleep 1000 >/dev/null 2>&1 &"})
        # The supervisor's own descriptor is in a message that it reads when the server dies.
        assert holders(served.port) - {served.process.pid} == {served.server()}


@pytest.mark.long
def test_ctrl_c_reaches_the_server_once_and_the_second_ends_it_at_once(shell: Shell) -> None:
    # As at a shell: the terminal's SIGINT goes to every process of the foreground group.
    keyboard, terminal = os.openpty()
    program = (sys.executable, "-c", FOREGROUND, *COMMAND)
    options = ("--port", "0", "--drain-seconds", "600")
    try:
        with running(shell, *options, program=program, stdin=terminal, start_new_session=True) as served:
            Player.connect(served.port, "slow-verdict").call("claim_done", {})
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


@pytest.mark.parametrize("supervisor", [True, False])
def test_requests_wait_at_the_socket_of_systemd(shell: Shell, supervisor: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = (sys.executable, "-c", ACTIVATED, str(listener.fileno()), *COMMAND)
        options = ("--port", str(port)) if supervisor else ("--no-supervisor",)
        with running(shell, *options, program=program, pass_fds=[listener.fileno()]) as served:
            assert served.port == port
            assert served.health()["status"] == "ok"
            assert served.server() in holders(port)
            served.process.terminate()
            assert served.process.wait(WAIT_SECONDS) == 0
        with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            with running(shell, *options, program=program, pass_fds=[listener.fileno()]):
                assert early.recv(100).startswith(b"HTTP/1.1 200 ")


def activation_error(shell: Shell, *options: str, sockets: list[socket.socket]) -> str:
    descriptors = [listener.fileno() for listener in sockets]
    command = [sys.executable, "-c", ACTIVATED, ",".join(map(str, descriptors)), *COMMAND, "serve", *options]
    done = subprocess.run(
        [*command, "--suite", SUITE, "--provider", "host"],
        cwd=shell.folder,
        env=shell.environment,
        pass_fds=descriptors,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.long
def test_a_socket_of_systemd_that_does_not_fit_is_an_error(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as silent:
        port = listener.getsockname()[1]
        message = activation_error(shell, "--port", "9", sockets=[listener])
        assert f"--port 9: systemd opened a socket at 127.0.0.1:{port}" in message
        message = activation_error(shell, "--no-supervisor", "--host", "::1", sockets=[listener])
        assert "--host ::1" in message
        assert "no listening TCP socket" in activation_error(shell, sockets=[silent])
        assert "systemd passed 2 sockets" in activation_error(shell, sockets=[listener, silent])


@pytest.mark.long
def test_an_error_at_the_start_is_reported_once(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = shell.run("serve", "--suite", SUITE, "--provider", "host", "--port", port)
    assert done.returncode == 1
    assert done.stderr.count("Address already in use") == 1
    done = shell.run("serve", "--prot", "1")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_without_a_supervisor_the_server_is_the_only_process(shell: Shell) -> None:
    with running(shell, "--port", "0", "--no-supervisor") as served:
        assert served.server() == served.process.pid
        served.process.kill()
        served.process.wait()
        with pytest.raises(ConnectionRefusedError):
            served.health()


@contextmanager
def call_in_progress(served: Running, command: str) -> Generator[list[str]]:
    """Run a shell command through a tool; the list gets the response if there is one, at the end."""
    called, responses = served.state / "called", list[str]()
    player = Player.connect(served.port, "find-answer")

    def call() -> None:
        with suppress(OSError, http.client.HTTPException):
            responses.append(player.call("probe__shell", {"command": f"touch {called}; {command}"}))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert eventually(called.exists)
        yield responses
    finally:
        thread.join()


@pytest.mark.long
def test_a_hand_over_answers_calls_in_progress_and_cleans_nothing_up(shell: Shell) -> None:
    with running(shell, "--port", "0", "--hand-over") as served:
        with call_in_progress(served, "sleep 1; echo $((6 * 7))") as responses:
            served.process.terminate()
            assert served.process.wait(WAIT_SECONDS) == 0
        assert "42" in responses[0]
        assert served.log.wait("handed over")
        assert not served.log.records("draining")
        assert not served.ready.exists()
        assert list((served.state / "servers").iterdir())
        assert list((served.state / "episodes").iterdir())
        assert not list((served.state / "episodes").glob("*/verdict.json"))


@pytest.mark.long
def test_a_client_that_has_just_connected_is_answered_before_a_hand_over(shell: Shell) -> None:
    with running(shell, "--port", "0", "--hand-over") as served:
        address = ("127.0.0.1", served.port)
        idle = http.client.HTTPConnection(*address, timeout=WAIT_SECONDS)
        with socket.create_connection(address, WAIT_SECONDS) as fresh, closing(idle):
            idle.request("GET", "/healthz")
            assert idle.getresponse().read()
            served.process.terminate()
            served.log.wait("stopping")
            assert idle.sock.recv(1) == b""
            fresh.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            response = http.client.HTTPResponse(fresh)
            response.begin()
            assert (response.status, response.headers["Connection"]) == (200, "close")
            assert served.process.wait(WAIT_SECONDS) == 0


@pytest.mark.long
def test_a_second_signal_ends_a_hand_over_at_once(shell: Shell) -> None:
    with running(shell, "--port", "0", "--hand-over") as served:
        with call_in_progress(served, "sleep 60") as responses:
            served.process.terminate()
            served.log.wait("stopping")
            started = time.monotonic()
            served.process.terminate()
            assert served.process.wait(WAIT_SECONDS) == 0
            assert time.monotonic() - started < GRACE_SECONDS
        assert responses == []


def test_a_hand_over_requires_sandboxes_that_survive(shell: Shell) -> None:
    flags = ("--suite", SUITE, "--provider", "host", "--port", "0")
    message = shell.error("serve", *flags, "--hand-over", "--survive-seconds", "0", status=1)
    assert message.startswith("--hand-over requires --survive-seconds")


@pytest.mark.long
def test_ctrl_c_ends_a_server_that_would_hand_over(shell: Shell) -> None:
    with running(shell, "--port", "0", "--hand-over") as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(WAIT_SECONDS) == 0
        assert not served.log.records("handed over")
        assert not list((served.state / "servers").iterdir())


@pytest.mark.long
def test_a_server_that_hands_over_by_itself_is_replaced(shell: Shell) -> None:
    with running(shell, "--port", "0", "--hand-over") as served:
        os.kill(served.server(), signal.SIGTERM)
        assert served.health()["status"] == "ok"
        assert served.server(2) != served.server()
        assert served.log.records("started again")[0]["ended_by"] == "hand-over"


def test_a_store_of_another_version_is_refused_once(shell: Shell, tmp_path: Path) -> None:
    state = tmp_path / "other"
    state.mkdir()
    with closing(sqlite3.connect(state / "store.db")) as store:
        store.execute("PRAGMA user_version = 99")
    message = shell.error("serve", "--state", str(state), "--isolation", "none", status=2)
    assert "has schema 99" in message


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


def test_pauses_do_not_grow_beyond_their_limit() -> None:
    limits = supervisor.RestartLimits()
    assert [limits.pause(failures) for failures in (1, 2, 3, 8, 9, 10_000)] == [0, 0.5, 1, 16, 16, 16]


@pytest.mark.parametrize(
    ("end", "status", "servers"),
    [
        ("sys.exit(1)", 1, 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, 1),
        (READY + "sys.exit(0)", 0, 1),
        (READY + "sys.exit(2 if supervised.restarts else 1)", 2, 2),
        (READY + "sys.exit(75 if supervised.restarts < 9 else 0)", 0, 10),
        (READY + "os.kill(os.getpid(), signal.SIGABRT)", 134, 4),
        (
            f"if supervised.restarts < 2: {READY}sys.exit(1)\nsys.exit(1 if supervised.restarts < 3 else 0)",
            0,
            4,
        ),
    ],
    ids=["never ready", "killed, never ready", "ended", "usage", "hand-over", "abort", "ready, then not"],
)
def test_only_a_server_that_was_ready_is_started_again(
    tmp_path: Path, end: str, status: int, servers: int
) -> None:
    done = fake(tmp_path, end)
    assert done.returncode == status, done.stderr
    assert len(done.stdout.splitlines()) == servers


def test_a_server_whose_supervisor_is_gone_ends_before_it_starts(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", FAKE],
            cwd=tmp_path,
            env={**os.environ, "_DECATHLON_SUPERVISOR": f"1 {theirs.fileno()} -1 0 0 -"},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            check=False,
            timeout=WAIT_SECONDS,
        )
    assert done.returncode == 137
    assert done.stdout == b""


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
