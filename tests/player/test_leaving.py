"""However the player ends, the episode is closed and the terminal restored."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any, cast

import pytest
from decathlon_client.player.terminal import LossyFile

from decathlon_mcp.cli.options import PREFIX
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

BOUND_SECONDS = 120.0
ALTERNATE, BACK = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """The player in a pseudo-terminal of 80 × 24 characters."""

    def __init__(self, state: Path) -> None:
        command = [sys.executable, "-m", "decathlon_mcp.cli", "play", "find-answer"]
        command += ["--suite", SUITE, "--provider", "host", "--state", str(state)]
        self.process, self.line = pty.fork()
        if self.process == 0:
            for name in [name for name in os.environ if name.startswith(PREFIX)]:
                del os.environ[name]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm-256color"})
        ioctl(self.line, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.content = b""

    def read_until(self, word: bytes | None) -> None:
        """Read until this text appears, or to the end of the output."""
        deadline = time.monotonic() + BOUND_SECONDS
        while word is None or word not in self.content:
            assert time.monotonic() < deadline, self.content[-2000:]
            if not select.select([self.line], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(self.line, 1 << 16)
            except OSError:  # what Linux says when the last process of a terminal has gone
                chunk = b""
            if not chunk:
                assert word is None, self.content[-2000:]
                return
            self.content += chunk

    def status(self) -> int:
        """Wait for the end; returns the exit status."""
        deadline = time.monotonic() + BOUND_SECONDS
        while True:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                self.process = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.02)


@contextmanager
def terminal(state: Path) -> Generator[Terminal]:
    made = Terminal(state)
    try:
        yield made
    finally:
        with suppress(OSError):
            os.close(made.line)
        if made.process:
            os.kill(made.process, signal.SIGKILL)
            os.waitpid(made.process, 0)


def endings(state: Path) -> list[str]:
    """The `end` events in a state folder."""
    files = state.glob("episodes/*/trajectory.jsonl")
    return [str(json.loads(file.read_text("utf-8").splitlines()[-1]).get("ending")) for file in files]


@pytest.mark.parametrize("how", ["ctrl-c", "hang-up"])
def test_leaving_closes_the_episode_and_restores_the_terminal(tmp_path: Path, how: str) -> None:
    with terminal(tmp_path) as player:
        player.read_until(b"playing")
        assert ALTERNATE in player.content
        if how == "ctrl-c":
            os.write(player.line, b"\x03")
            player.read_until(b"Close it?")
            os.write(player.line, b"\x03")
            player.read_until(None)
            assert BACK in player.content
            assert b"\x1b[?25h" in player.content[player.content.rindex(BACK) :]
            assert player.content.rsplit(b"\x1b[?", 1)[1][-1:] in b"hl"
        else:
            os.close(player.line)
        assert player.status() == (0 if how == "ctrl-c" else 128 + signal.SIGHUP)
    assert endings(tmp_path) == ["closed by its client"]
    assert processes_marked(tmp_path) == []
    assert "episode ready" in (tmp_path / "play.log").read_text("utf-8")


def test_output_to_a_terminal_that_has_gone_is_lost_without_an_error() -> None:
    """Textual's thread for output would end with the error, and the player would hang at its end."""
    line, terminal_end = pty.openpty()
    os.close(line)
    # Unbuffered, so that nothing is left to be written when it is closed.
    with open(terminal_end, "wb", buffering=0) as gone:  # noqa: PTH123  (a descriptor)
        output = LossyFile(io.TextIOWrapper(cast("Any", Unbuffered(gone)), write_through=True))
        assert output.write("text") == 4
        output.flush()
        with pytest.raises(OSError, match="Input/output"):
            gone.write(b"text")


class Unbuffered(io.RawIOBase):
    """Passes every write to a file."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)
