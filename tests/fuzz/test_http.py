"""The short form of `tests.fuzz.http`: the corpus and generated inputs at a server in another process."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from random import Random

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cheats.http_attacks import open_session
from tests.fuzz.http import CORPUS, fault_in, generate
from tests.http.server_process import HOST, ServerProcess, server_process

REPLY_SECONDS = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[ServerProcess]:
    with server_process(folder, "--max-sandboxes", "2", "--idle-seconds", "2") as server:
        yield server


def answer_to(server: ServerProcess, data: bytes) -> bytes:
    """What the server sends within a short time."""
    answer = b""
    with socket.create_connection((HOST, server.port)) as connection, suppress(OSError):
        connection.settimeout(10)
        connection.sendall(data)
        connection.settimeout(REPLY_SECONDS)
        while chunk := connection.recv(1 << 16):
            answer += chunk
    return answer


def test_corpus_is_answered_without_faults(server: ServerProcess, folder: Path) -> None:
    session = anyio.run(open_session, HOST, server.port).encode()
    for file in sorted(CORPUS.iterdir()):
        data = file.read_bytes().replace(b"{session}", session)
        assert fault_in(answer_to(server, data)) is None, file.name
    assert server.health_seconds() < 10
    assert "Traceback" not in (folder / "log").read_text()


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.randoms(use_true_random=False))
def test_generated_requests_are_answered_without_faults(
    server: ServerProcess, folder: Path, random: Random
) -> None:
    assert fault_in(answer_to(server, generate(random))) is None
    assert server.health_seconds() < 10
    assert "Traceback" not in (folder / "log").read_text()
