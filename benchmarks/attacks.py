"""`python -m benchmarks.attacks [--write]`: what an attack costs the server and an honest neighbour.

Each attack runs in a process of its own against a fresh server with a limited address space. Meanwhile
`/healthz` is requested without pause; afterwards an episode that was open before the attack is played to its
end. Results: peak memory of the server, the worst latency of `/healthz`, and the neighbour's verdict.
`--python` measures another installation of the server, such as an older version.
"""

from __future__ import annotations

import argparse
import http.client
import json
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.report import table
from benchmarks.running import SUITE

RESULTS = Path(__file__).parent / "ATTACKS.md"
PROTOCOL = "2025-11-25"
MIB = 1 << 20
GIB = 1 << 30
START_SECONDS = 180.0
ATTACK_SECONDS = 180.0
NEIGHBOUR_SECONDS = 60.0
"""Time limit for each request of the honest neighbour."""
STALLED_CONNECTIONS = 200
STALL_SECONDS = 130.0
"""How long the connections that never complete a request are watched."""
MAX_LINKS = 64_000
"""A file of ext4 has at most 65,000 names."""
LINKED_BYTES = 30_000
FORM_SECONDS = 10.0
"""How long an attacker's form waits for the server."""
INTRODUCTION = """\
Each attack runs against a fresh server without isolation that has {limit:g} GiB of address space. The
neighbour is an episode that was open before; it is played and graded after the attack."""

Address = tuple[str, int]


class Session:
    """A session of the handshake era with a connection for each request; the standard library only."""

    def __init__(self, address: Address, path: str, *, timeout_seconds: float = ATTACK_SECONDS) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=timeout_seconds)
        self._path = path
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": PROTOCOL,
        }
        client = {"name": "attack", "version": "1"}
        parameters = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        self.post(as_request("initialize", parameters))
        self.post(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Send one body. Returns status and reply."""
        try:
            self._connection.request("POST", self._path, body, self._headers)
            response = self._connection.getresponse()
            if session_id := response.getheader("mcp-session-id"):
                self._headers["Mcp-Session-Id"] = session_id
            return response.status, response.read()
        finally:
            # The next request opens it again: the server closes connections that are idle during an attack.
            self._connection.close()

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result. Raises RuntimeError for anything else."""
        _, body = self.post(as_request(method, params))
        data = next((line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")), body)
        reply = json.loads(data)
        if "result" not in reply:
            raise RuntimeError(data.decode()[:500])
        return reply["result"]

    def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self.request("tools/call", {"name": tool, "arguments": arguments})


def as_request(method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def send_all(address: Address, *parts: bytes, repeat: int = 1) -> str:
    """Send the parts, the last one `repeat` times. Returns the status line of the reply, if there is one."""
    with socket.create_connection(address, timeout=ATTACK_SECONDS) as connection:
        with suppress(OSError):
            for part in parts[:-1]:
                connection.sendall(part)
            for _ in range(repeat):
                connection.sendall(parts[-1])
        with suppress(OSError):
            connection.settimeout(5)
            return connection.recv(4096).split(b"\r\n", 1)[0].decode("latin-1") or "closed"
    return "closed or silent"


def endless_headers(address: Address) -> str:
    return send_all(address, b"GET /healthz HTTP/1.1\r\nHost: a\r\n", b"a:b\r\n" * 13_107, repeat=2_000)


def long_header(address: Address) -> str:
    return send_all(address, b"GET /healthz HTTP/1.1\r\nHost: a\r\nb: ", b"x" * MIB, repeat=50)


def stalled_connections(address: Address) -> str:
    """Open connections that never complete a request; count those that the server still keeps."""
    head = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    beginnings = [b"", b"POST /mcp", head, head + b"Content-Length: 1000\r\n\r\n{"]
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(address)) for _ in range(STALLED_CONNECTIONS)
        ]
        for number, connection in enumerate(connections):
            connection.sendall(beginnings[number % len(beginnings)])
        time.sleep(STALL_SECONDS)
        still_open = 0
        for connection in connections:
            connection.setblocking(False)
            with suppress(ConnectionError):
                try:
                    while connection.recv(4096):
                        pass
                except BlockingIOError:
                    still_open += 1
    return f"{still_open} of {len(connections)} open after {STALL_SECONDS:.0f} s"


def body_of_brackets(address: Address) -> str:
    session = Session(address, "/mcp")
    padding = b"[" + b"[]," * (20 * MIB) + b"[]]"
    body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"x": ' + padding + b"}}"
    return _outcome(lambda: session.post(body))


def long_tool_name(address: Address) -> str:
    session = Session(address, "/tasks/hostile/mcp")
    session.request("tools/list", {})
    return _outcome(lambda: session.post(as_request("tools/call", {"name": "reply" * (12 * MIB)})))


def long_task_name(address: Address) -> str:
    session = Session(address, "/mcp")
    arguments = {"task": "plain" * (12 * MIB)}
    return _outcome(
        lambda: session.post(as_request("tools/call", {"name": "start_episode", "arguments": arguments}))
    )


def replies_of_brackets(address: Address) -> str:
    session = Session(address, "/tasks/hostile/mcp")
    session.request("tools/list", {})
    arguments = {"pattern": "brackets", "size_bytes": 58 * MIB}
    body = as_request("tools/call", {"name": "hostile__reply", "arguments": arguments})
    outcomes = {_outcome(lambda: session.post(body)) for _ in range(3)}
    return f"{', '.join(sorted(outcomes))}; then claim: {_outcome(lambda: session.post(_EVALUATE))}"


def large_answers(address: Address) -> str:
    outcomes: set[str] = set()
    for _ in range(4):
        session = Session(address, "/tasks/hostile/mcp")
        session.request("tools/list", {})
        body = as_request("tools/call", {"name": "claim_done", "arguments": {"answer": "x" * (50 * MIB)}})
        outcomes.add(_outcome(lambda session=session, body=body: session.post(body)))
    return ", ".join(sorted(outcomes))


def forms_of_a_page(address: Address) -> str:
    """Forms of the page, most without their last byte and some full of escapes, sent at once."""
    size = 4 * MIB
    head = (
        f"POST /page/session HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
        f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {size}\r\n\r\n"
    ).encode()
    unfinished, escapes = b"secret=".ljust(size - 1, b"x"), (b"secret=" + b"%41" * size)[:size]
    replies: set[str] = set()

    def send(body: bytes) -> None:
        with socket.create_connection(address, timeout=FORM_SECONDS) as connection, suppress(OSError):
            with suppress(OSError):
                connection.sendall(head + body)
            replies.add(connection.recv(4096).split(b"\r\n", 1)[0].decode("latin-1"))

    threads = [threading.Thread(target=send, args=(unfinished,)) for _ in range(100)]
    threads += [threading.Thread(target=send, args=(escapes,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(sorted(filter(None, replies))) or "closed or silent"


def workspace_of_links(address: Address) -> str:
    """The time to the verdict, also of an attempt with an empty workspace."""
    times: list[float] = []
    for number in (0, MAX_LINKS):
        session = Session(address, "/tasks/hostile/mcp")
        session.request("tools/list", {})
        session.call("hostile__link", {"number": number, "size_bytes": LINKED_BYTES})
        start = time.perf_counter()
        outcome = _outcome(lambda session=session: session.post(_EVALUATE))
        times.append(time.perf_counter() - start)
    return f"{outcome} after {times[1]:.1f} s, without links after {times[0]:.1f} s"


_EVALUATE = as_request("tools/call", {"name": "evaluate", "arguments": {}})

ATTACKS: dict[str, Callable[[Address], str]] = {
    "none, for comparison": lambda address: str(time.sleep(5) or ""),
    "130 MB of header lines": endless_headers,
    "one header of 50 MB": long_header,
    f"{STALLED_CONNECTIONS} connections that never complete a request": stalled_connections,
    "a body of 60 MB of brackets": body_of_brackets,
    "a tool name of 60 MB": long_tool_name,
    "a task name of 60 MB": long_task_name,
    "three replies of 58 MB of brackets, then a claim": replies_of_brackets,
    "four answers of 50 MB": large_answers,
    "108 forms of 4 MB for the page": forms_of_a_page,
    f"a workspace of {MAX_LINKS} links to a file of 30 kB": workspace_of_links,
}


def _outcome(operation: Callable[[], tuple[int, bytes]]) -> str:
    """Whether a request was answered with a result, an error of MCP, or a status of HTTP."""
    try:
        status, body = operation()
    except (OSError, http.client.HTTPException) as error:
        return f"connection lost ({type(error).__name__})"
    if status != http.client.OK:
        return f"status {status}"
    return "error" if b'"error"' in body or b'"isError":true' in body else "result"


@dataclass(slots=True)
class HealthProbe:
    """Requests `/healthz` without pause in a thread and keeps the worst latency."""

    address: Address
    worst_seconds: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Generator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            start = time.perf_counter()
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(*self.address, timeout=ATTACK_SECONDS)
                connection.request("GET", "/healthz")
                connection.getresponse().read()
                connection.close()
            self.worst_seconds = max(self.worst_seconds, time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one attack cost. `peak_mib` is None if the server did not survive."""

    attack: str
    reply: str
    peak_mib: float | None
    worst_health_seconds: float
    neighbour: str


@contextmanager
def limited_server(python: str, limit_bytes: int) -> Generator[tuple[Address, subprocess.Popen[bytes]]]:
    """A server without isolation whose address space is limited."""
    with tempfile.TemporaryDirectory(prefix="decathlon-attacks-") as name:
        ready = Path(name) / "ready"
        options = {
            "--suite": SUITE,
            "--provider": "host",
            "--port": 0,
            "--state": name,
            "--ready-file": ready,
        }
        flags = [str(part) for option in options.items() for part in option]
        flags += ["--log-level", "error", "--no-supervisor"]
        command = [python, "-m", "decathlon_mcp.cli", "serve", *flags]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command,
                cwd=name,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),  # noqa: PLW1509
            )
            try:
                deadline = time.monotonic() + START_SECONDS
                while not ready.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(log.read().decode(errors="replace")[-2000:])
                    time.sleep(0.05)
                host, _, port = ready.read_text().strip().removeprefix("http://").rpartition(":")
                yield (host, int(port)), process
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def measure(attack: str, *, python: str, limit_bytes: int) -> Outcome:
    """Run one attack against a fresh server."""
    with limited_server(python, limit_bytes) as (address, process):
        neighbour = Session(address, "/tasks/plain/mcp", timeout_seconds=NEIGHBOUR_SECONDS)
        neighbour.request("tools/list", {})
        probe = HealthProbe(address)
        with probe.running():
            command = [
                sys.executable,
                "-m",
                "benchmarks.attacks",
                "--attack",
                attack,
                "--port",
                str(address[1]),
            ]
            attacker = subprocess.run(command, capture_output=True, text=True, check=False)
        reply = attacker.stdout.strip() or attacker.stderr.strip().rpartition("\n")[2]
        try:
            neighbour.call("plain__echo", {"text": ""})
            verdict = neighbour.call("evaluate", {})
            end = f"reward {verdict['structuredContent'].get('reward')}"
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            end = f"lost ({type(error).__name__})"
        peak_mib = None
        if process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak_mib = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        return Outcome(attack, reply, peak_mib, probe.worst_seconds, end)


def _report(machine: dict[str, str], outcomes: Sequence[Outcome], limit_gib: float) -> str:
    rows = (
        (
            outcome.attack,
            outcome.reply,
            "ended" if outcome.peak_mib is None else f"{outcome.peak_mib:.0f}",
            f"{outcome.worst_health_seconds * 1e3:.0f}",
            outcome.neighbour,
        )
        for outcome in outcomes
    )
    columns = ("attack", "reply", "peak memory MiB", "worst `/healthz` ms", "neighbour")
    head = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    return f"# Attacks\n\n{head}\n\n{INTRODUCTION.format(limit=limit_gib)}\n\n{table(columns, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULTS.name}")
    parser.add_argument("--python", default=sys.executable, help="Python of the server [this one]")
    parser.add_argument(
        "--limit-gib", type=float, default=3, help="address space of the server [%(default)s]"
    )
    parser.add_argument("--only", choices=ATTACKS, nargs="+", default=[*ATTACKS], help="run only these [all]")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        sys.stdout.write(ATTACKS[options.attack](("127.0.0.1", options.port)) + "\n")
        return
    outcomes: list[Outcome] = []
    for attack in options.only:
        outcomes.append(measure(attack, python=options.python, limit_bytes=int(options.limit_gib * GIB)))
        sys.stderr.write(f"{outcomes[-1]}\n")
    text = _report(machine(), outcomes, options.limit_gib)
    sys.stdout.write(text + "\n")
    if options.write:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
