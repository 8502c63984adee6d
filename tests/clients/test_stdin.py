"""Standard input: lines are passed on unchanged, except those over the limit. The signals that end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from decathlon_client import process
from decathlon_client.process import OVERLONG_LINE, StdinPump, stop_signals
from hypothesis import given, settings
from hypothesis import strategies as st


def pumped(*chunks: bytes) -> bytes:
    """What a reader gets of chunks that are written one after the other."""
    source, writer = os.pipe()
    receiver, sink = socket.socketpair()
    with receiver, sink, os.fdopen(source, "rb"), receiver.makefile("rb") as reader:
        with os.fdopen(writer, "wb", buffering=0) as file:
            # A pipe takes these chunks at once, so the writer never waits for the pump.
            for chunk in chunks:
                file.write(chunk)
        with StdinPump(source, sink):
            return reader.read()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"x", b"\n")), max_size=20))
def test_lines_are_passed_on_unchanged(chunks: list[bytes]) -> None:
    assert pumped(*chunks) == b"".join(chunks)


@pytest.mark.parametrize("size", [11, 30, 100])
def test_an_overlong_line_is_replaced_and_those_around_it_are_not(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(process, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(process, "CHUNK_BYTES", 7)
    text = b"short\n" + b"a" * size + b"\nb\n\nc\nend"
    expected = b"short\n" + OVERLONG_LINE + b"b\n\nc\nend"
    # Shorter than limit and chunk together, a line may still pass.
    assert pumped(text) in ((expected, text) if size <= 17 else (expected,))


def test_a_closed_terminal_ends_a_process_without_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run under nohup themselves.
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, previous)
    monkeypatch.delattr(signal, "SIGHUP")
    assert stop_signals() == (signal.SIGINT, signal.SIGTERM)


WINDOWS_LACKS = """
import os, signal, socket, sys
import mcp.client.streamable_http
for module, names in (
    (signal, ("SIGHUP", "SIGKILL", "SIGCHLD", "SIGQUIT", "SIGUSR1", "pthread_sigmask", "sigwaitinfo")),
    (os, ("getuid", "geteuid", "fork", "setsid", "killpg", "fchmod", "posix_spawn", "memfd_create")),
    (socket, ("AF_UNIX", "send_fds", "recv_fds")),
):
    for name in names:
        delattr(module, name)
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_the_bridge_and_the_client_need_nothing_that_windows_lacks() -> None:
    code = f"{WINDOWS_LACKS}\nimport decathlon_client, decathlon_client.bridge, decathlon_client.resume"
    subprocess.run([sys.executable, "-c", code], check=True)
