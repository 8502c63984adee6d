"""A server in a process of its own, whose memory and response times can be measured."""

from __future__ import annotations

import http.client
import os
import subprocess
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cli.conftest import COMMAND
from tests.probe.serving import SUITE

HOST = "127.0.0.1"


@dataclass(slots=True)
class ServerProcess:
    """A running `decathlon-mcp serve` with the probe suite."""

    port: int
    pid: int
    worst_seconds: float = 0.0
    """Longest time that `/healthz` took while `watched` was open."""

    def peak_mib(self) -> float:
        """The peak of the process's memory since `reset_peak`."""
        return self._status("VmHWM")

    def memory_mib(self) -> float:
        return self._status("VmRSS")

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def health_seconds(self) -> float:
        """How long a request to `/healthz` takes. Raises OSError if it fails."""
        started = time.monotonic()
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
        finally:
            connection.close()
        return time.monotonic() - started

    @contextmanager
    def watched(self) -> Generator[None]:
        """Measure `/healthz` again and again while the context is open."""
        self.worst_seconds = 0.0
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.1):
                with suppress(OSError):
                    self.worst_seconds = max(self.worst_seconds, self.health_seconds())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@contextmanager
def server_process(folder: Path, *arguments: str, launcher: Sequence[str] = ()) -> Generator[ServerProcess]:
    """Start a server and kill it at the end. `launcher`: a command line that executes the rest of it."""
    ready = folder / "ready"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    options = ["--suite", SUITE, "--provider", "host", "--port", "0", "--state", str(folder / "state")]
    # This process is measured and killed, and its sandboxes end with it.
    options += ["--no-supervisor", "--survive-seconds", "0"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [*launcher, *COMMAND, "serve", *options, "--ready-file", str(ready), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=log,
        ) as process,
    ):
        try:
            while not ready.exists():
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            yield ServerProcess(int(ready.read_text().strip().rpartition(":")[2]), process.pid)
        finally:
            process.kill()
