"""A server as a child of this process, for programs that name none: `decathlon-mcp serve` on a free port.

A process of Python between the two ends the server when this process ends, also by SIGKILL. The kernel's
signal for the death of a parent (prctl(2), PR_SET_PDEATHSIG) would come when the *thread* ends that started
the server.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread

from decathlon_client.errors import ClientError
from decathlon_client.sdk import Session
from decathlon_client.session import HttpEndpoint, SessionOwner

COMMAND = "decathlon-mcp"
READY_SECONDS = 120.0
"""How long a start may take: that of a Docker engine's first sandbox is part of it."""
CLOSE_SECONDS = 45.0
"""How long the end may take: a server waits up to 30 s for evaluations that run."""
POLL_SECONDS = 0.05
LOG_CHARACTERS = 1500

log = logging.getLogger("decathlon.client")

# Ends with its own stdin, a pipe whose other end only the parent has, or with the server.
_GUARD = f"""
import os, select, shutil, subprocess, sys
server = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
select.select([0, os.pidfd_open(server.pid)], [], [])
server.terminate()
try:
    status = server.wait({CLOSE_SECONDS})
except subprocess.TimeoutExpired:
    server.kill()
    status = server.wait()
if select.select([0], [], [], 0)[0]:
    shutil.rmtree(sys.argv[1], ignore_errors=True)  # the parent may be gone
sys.exit(status if status >= 0 else 128 - status)
"""


class ChildServer:
    """A running server; made by `start`. `url` is its address."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.url = ""

    @classmethod
    def start(
        cls, program: str | os.PathLike[str] | None, suites: Sequence[str], settings: Mapping[str, Any]
    ) -> Self:
        """Start a server and wait until it is ready.

        `program` is the file or the name of `decathlon-mcp`; None: the one beside this Python, else the one
        on the PATH. `settings` are options of `serve` by name: `max_sandboxes=64`, `dense=True`. Raises
        ClientError with the end of its log if it does not start, or if there is no such program.
        """
        command = [find_program(program), "serve", "--port", "0", *options(suites, settings)]
        folder = Path(tempfile.mkdtemp(prefix="decathlon-server-"))
        try:
            with (folder / "log").open("wb") as server_log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-c",
                        _GUARD,
                        str(folder),
                        *command,
                        "--ready-file",
                        str(folder / "url"),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=server_log,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the server
                )
            server = cls(process, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            server._wait_until_ready()
        except BaseException:
            server.close()
            raise
        log.info("A server runs at %s", server.url)
        return server

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.url:
            with suppress(FileNotFoundError):
                self.url = (self._folder / "url").read_text().strip()
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                what = f"ended with status {status}" if status is not None else "is not ready"
                log_text = (self._folder / "log").read_text(errors="replace").strip()
                raise ClientError(
                    f"the server {what}: {log_text[-LOG_CHARACTERS:] or 'it printed nothing'}",
                    code="server_not_started",
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the server: its episodes are closed; claimed attempts are still graded, for up to 30 s."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class ChildEndpoint:
    """A server that runs as long as a connection to it: `server=` of `tool_decathlon.ToolDecathlonEnv`."""

    def __init__(
        self, program: str | os.PathLike[str] | None, suites: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        self._start = (program, suites, settings)
        self._http: HttpEndpoint | None = None

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        server: ChildServer | None = None
        try:
            # Not cancelled: a server that was started has to be ended.
            with anyio.CancelScope(shield=True):
                server = await anyio.to_thread.run_sync(ChildServer.start, *self._start)
            assert server is not None
            self._http = HttpEndpoint(server.url, "")
            async with self._http.run():
                yield
        finally:
            if server is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(server.close)

    @property
    def _endpoint(self) -> HttpEndpoint:
        assert self._http is not None, "the server is not running"
        return self._http

    def address(self, episode: str | None) -> str:
        return self._endpoint.address(episode)

    def open_session(self, owner: SessionOwner, episode: str | None) -> AbstractAsyncContextManager[Session]:
        return self._endpoint.open_session(owner, episode)


_of_process: dict[tuple[object, ...], ChildServer] = {}
_starting = threading.Lock()


def server_of_this_process(
    program: str | os.PathLike[str] | None = None,
    suites: Sequence[str] = ("starter",),
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The URL of a server for all of this process, which is started now if it does not run and ends with it.

    Takes and raises what `ChildServer.start` does.
    """
    settings = dict(settings or {})
    key = (os.getpid(), program, tuple(suites), repr(sorted(settings.items())))
    with _starting:
        if key not in _of_process:
            server = _of_process[key] = ChildServer.start(program, suites, settings)
            atexit.register(_close_own, os.getpid(), server)
        return _of_process[key].url


def _close_own(pid: int, server: ChildServer) -> None:
    # A fork has its parent's exit handlers too.
    if os.getpid() == pid:
        server.close()


def find_program(program: str | os.PathLike[str] | None) -> str:
    """The file of the server's program. Raises ClientError if there is none."""
    wanted = os.fspath(program) if program is not None else None
    own = Path(sys.executable).parent / COMMAND
    found = shutil.which(wanted) if wanted else str(own) if own.is_file() else shutil.which(COMMAND)
    if found is None or (not wanted and not _is_server(found)):
        missing = f"there is no program {wanted!r}" if wanted else "the server is not installed here"
        raise ClientError(
            f"{missing}; install it, in an environment of its own if this one's packages do not fit, and "
            f"name the program: python3 -m venv server && server/bin/pip install "
            f"'decathlon-mcp[server,starter]', then server={'server/bin/' + COMMAND!r}; or name a running "
            "server by its URL",
            code="server_not_installed",
        )
    return str(Path(found).absolute())


def _is_server(program: str) -> bool:
    """Whether the program runs: the client's own installation has it too, without the server's packages."""
    finished = subprocess.run(
        [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return finished.returncode == 0


def options(suites: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Command-line options for settings by name. Raises TypeError for a value that none can be."""
    words = [word for suite in suites for word in ("--suite", os.fspath(suite))]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (str, int, float, Path)):
            words += [flag, str(value)]
        else:
            raise TypeError(f"{name}: a text, a number or a bool was expected, not {value!r}")
    return words
