"""`stdio`: stdout carries only protocol messages, and the process ends with stdin or on a signal."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import termios
import time
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.cli.conftest import COMMAND, Shell
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

pytestmark = pytest.mark.slow


INITIALIZE = {
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


class Pipe:
    """A client that exchanges JSON lines and keeps every line that it receives."""

    def __init__(self, process: subprocess.Popen[str], state: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.state = state
        self.stdin: IO[str] = process.stdin
        self.stdout: IO[str] = process.stdout
        self.lines: list[str] = []

    def send(self, message: dict[str, Any]) -> None:
        self.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.stdin.flush()

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result."""
        number = len(self.lines) + 1
        self.send({"id": number, **message})
        while True:
            self.lines.append(self.stdout.readline())
            reply = json.loads(self.lines[-1])
            if reply.get("id") == number:
                return reply["result"]

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return self.request({"method": "tools/call", "params": {"name": name, "arguments": arguments}})


@contextmanager
def start_pipe(shell: Shell, *arguments: str) -> Generator[Pipe]:
    state = shell.folder / "state"
    options = ["--suite", SUITE, "--provider", "host", "--state", str(state), *arguments]
    with subprocess.Popen(
        [*COMMAND, "stdio", *options],
        cwd=shell.folder,
        env=shell.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            pipe = Pipe(process, state)
            pipe.request(INITIALIZE)
            pipe.send({"method": "notifications/initialized"})
            yield pipe
        finally:
            process.kill()


def test_with_a_task_the_process_is_an_episode_and_stdout_carries_only_messages(shell: Shell) -> None:
    with start_pipe(shell, "--task", "find-answer", "--log-level", "debug") as pipe:
        assert pipe.call("probe__write", path="answer.txt", text="42")
        assert pipe.call("claim_done")["structuredContent"]["claimed"] is True
        assert pipe.call("evaluate")["structuredContent"]["reward"] == 1.0
        pipe.stdin.close()
        assert pipe.process.wait(30) == 0
        lines = [*pipe.lines, *pipe.stdout.read().splitlines()]
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in lines)


@pytest.mark.parametrize("end", ["SIGTERM", "eof"])
def test_the_end_of_stdin_or_a_signal_ends_the_process_and_its_sandbox(shell: Shell, end: str) -> None:
    with start_pipe(shell, "--task", "find-answer") as pipe:
        pipe.call("probe__shell", command="setsid sleep 1000 >/dev/null 2>&1 &")
        if end == "eof":
            pipe.stdin.close()
        else:
            pipe.process.send_signal(signal.Signals[end])
        assert pipe.process.wait(30) == 0
        assert processes_marked(pipe.state) == []


def test_line_of_a_request_that_is_cancelled_is_written_to_its_end(shell: Shell) -> None:
    def wait_until_full(pipe: Pipe) -> None:
        """Until the server waits for its client to read."""
        unread = array("i", [0])
        while unread[0] < pipe_bytes:
            time.sleep(0.05)
            fcntl.ioctl(pipe.stdout, termios.FIONREAD, unread)

    with start_pipe(shell, "--task", "find-answer") as pipe:
        pipe.request(INITIALIZE)
        assert pipe.call("probe__echo", text="ready")["content"][0]["text"] == "ready"
        # As small as the kernel makes it: with its pages and the number of pipes, its size differs.
        pipe_bytes = fcntl.fcntl(pipe.stdout, fcntl.F_SETPIPE_SZ, 1)
        # More than the pipe has room for; then other lines wait too.
        arguments = {"to": 1, "message": "m" * 200_000}
        params = {"name": "probe__count", "arguments": arguments, "_meta": {"progressToken": 1}}
        pipe.send({"id": "counted", "method": "tools/call", "params": params})
        wait_until_full(pipe)
        pipe.send({"method": "notifications/cancelled", "params": {"requestId": "counted"}})
        for number in range(3):
            pipe.send({"id": f"after {number}", "method": "ping"})
        time.sleep(1)  # for the answers to wait too
        messages = [json.loads(pipe.stdout.readline()) for _ in range(4)]
        assert messages[0]["params"]["message"] == arguments["message"]
        assert {message.get("id") for message in messages[1:]} == {f"after {number}" for number in range(3)}
