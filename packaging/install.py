"""Installs locked requirements with pip and shows how far it is. `make` runs it with the Python of .venv.

    .venv/bin/python packaging/install.py requirements.lock

pip's own output is one line for each of the packages, or with `--quiet` nothing for a minute. This prints one
line that changes on a terminal, and a line every LINE_SECONDS elsewhere. pip's output goes to a file, and its
last lines are shown if it fails. Only the standard library: nothing is installed yet.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import time
from pathlib import Path

LINE_SECONDS = 10.0
SHOWN_ON_FAILURE = 15
LOG = Path(sys.prefix, "install.log")
PIN = re.compile(r"^[A-Za-z0-9][\w.-]*(?:\[[\w,]+\])?==", re.MULTILINE)
FETCHED = re.compile(r"(?:Collecting|Requirement already satisfied:|Ignoring) ([\w.-]+)")


class Progress:
    """One line about the state of an installation."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._started = self._shown_at = time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def show(self, done: int, activity: str) -> None:
        now = time.monotonic()
        line = f"{self._name}: {min(done, self._total)} of {self._total} packages, {activity}"
        if self._is_terminal:
            sys.stdout.write(f"\r\033[2K{line[:78]}")
        elif now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def finish(self, outcome: str) -> None:
        seconds = time.monotonic() - self._started
        clear = "\r\033[2K" if self._is_terminal else ""
        sys.stdout.write(f"{clear}{self._name}: {outcome} after {seconds:.0f} s\n")
        sys.stdout.flush()


def install(lock: Path) -> int:
    """Install what a lock file names and return pip's exit status."""
    total = len(PIN.findall(lock.read_text("utf-8")))
    progress = Progress(lock.name, total)
    progress.show(0, "asking the package index")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--require-virtualenv"]
    command += ["--progress-bar", "off", "--require-hashes", "-r", str(lock)]
    last: collections.deque[str] = collections.deque(maxlen=SHOWN_ON_FAILURE)
    done = 0
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            last.append(line)
            if match := FETCHED.match(line):
                done += 1
                progress.show(done, match[1])
            elif line.startswith("Installing collected packages"):
                progress.show(done, "unpacking")
    if pip.returncode == 0:
        progress.finish("installed")
    else:
        progress.finish("failed")
        sys.stderr.writelines([*last, f"The whole output of pip: {LOG}\n"])
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(Path(sys.argv[1])))
