"""The network guard itself, with programs of several languages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.suites import node
from tests.network_guard import NetworkGuard

# 192.0.2.1 is reserved for documentation: even without the guard nothing would answer.
ATTEMPTS = """
import socket, sys
for kind, call in ((socket.SOCK_STREAM, "connect"), (socket.SOCK_DGRAM, "sendto")):
    with socket.socket(type=kind) as client:
        try:
            getattr(client, call)(*([b"x"] if call == "sendto" else []), ("192.0.2.1", 9))
        except OSError as error:
            print(call, error.errno)
try:
    socket.getaddrinfo("telemetry.example", 443)
except socket.gaierror:
    print("no such name")
socket.create_connection(("localhost", int(sys.argv[1]))).close()
print("loopback")
"""
NODE_ATTEMPT = """
fetch("http://telemetry.example/").catch(() =>
  fetch("http://192.0.2.1:4321/").catch(() =>
    fetch(`http://127.0.0.1:${process.argv[1]}/`).catch(error => console.log(error.cause.code))))
"""


@pytest.fixture
def guard(tmp_path: Path) -> NetworkGuard:
    return NetworkGuard.compile(tmp_path)


def _run(guard: NetworkGuard, *command: str | Path) -> list[str]:
    environment = {**os.environ, **guard.environment}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def test_what_is_not_loopback_is_refused_and_recorded(guard: NetworkGuard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        output = _run(guard, sys.executable, "-c", ATTEMPTS, str(server.getsockname()[1]))
    assert output == ["connect 101", "sendto 101", "no such name", "loopback"]
    expected = {"connect 192.0.2.1": 1, "sendto 192.0.2.1": 1, "lookup telemetry.example": 1}
    assert guard.take_attempts() == expected
    assert not guard.attempts


def test_node_is_guarded_too(guard: NetworkGuard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    assert _run(guard, node(), "-e", NODE_ATTEMPT, port) == ["ECONNREFUSED"]
    assert guard.attempts == {"lookup telemetry.example": 1, "connect 192.0.2.1": 1}
