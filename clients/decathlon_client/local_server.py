"""Servers that a program runs for itself: as a child process, or in its own process.

A child is `decathlon-mcp serve` on a free port. A process of Python between the two ends it when this process
ends, also by SIGKILL. The kernel's signal for the death of a parent (prctl(2), PR_SET_PDEATHSIG) would come
when the *thread* ends that started the server.

An embedded server has no port and no HTTP: the lobby and each episode are reached over in-memory streams.
Only for it does this package import the server, and only once it runs.
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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
from mcp.shared.memory import create_client_server_memory_streams
from mcp.shared.message import SessionMessage

from decathlon_client.client_errors import ClientError, error_from_code
from decathlon_client.client_session import HttpEndpoint, SessionOwner
from decathlon_client.sdk import Session

if TYPE_CHECKING:
    from decathlon_mcp.episodes.registry import EpisodeRegistry


COMMAND = "decathlon-mcp"
READY_SECONDS = 120.0
"""How long a start may take, with the first sandbox of a Docker engine."""
DRAIN_SECONDS, STOP_SECONDS = 30.0, 30.0
"""How long a server that stops waits for gradings, unless `drain_seconds` is set; and how long it may take
for all else, above all for the removal of its sandboxes. Then it is killed."""
POLL_SECONDS = 0.05
"""Between two looks for the file with the URL. A start takes a second."""
LOG_CHARACTERS = 1500
"""How much of the end of a log is in an error: its last ten lines, about."""

log = logging.getLogger("decathlon.client")

# Ends with its own stdin, a pipe whose other end only the parent has, or with the server. If it is killed, as
# Ray kills the children of its workers, the kernel sends the server SIGTERM.
_GUARD = """
import ctypes, os, select, shutil, signal, subprocess, sys
PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl
folder, stop_seconds, *command = sys.argv[1:]
end_with_guard = lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_guard)
select.select([0, os.pidfd_open(server.pid)], [], [])
server.terminate()
try:
    status = server.wait(float(stop_seconds))
except subprocess.TimeoutExpired:
    server.kill()
    status = server.wait()
if select.select([0], [], [], 0)[0]:
    shutil.rmtree(folder, ignore_errors=True)  # the parent may be gone
sys.exit(status if status >= 0 else 128 - status)
"""
CLOSE_SECONDS = 5.0
"""How long the server may take to end a session, and with it perhaps an episode."""
MISSING_SERVER = (
    "this runs the server in this process, but only the client is installed; to add the server, in the "
    "clone: pip install '.[server,starter]'; where its packages do not fit beside a trainer's, install it in "
    "an environment of its own and name its program: ToolDecathlonEnv(server='server/bin/decathlon-mcp')"
)


class ChildServer:
    """A server in a process of its own, which ends with this process.

    `command` starts `decathlon-mcp`; see `find_program`. `settings` are options of `serve` by name:
    `max_sandboxes=64`, `merge_pages=True`. `environment` and `cwd`: None for this process's own.
    `shares_stderr`: its log goes to this process's stderr, and not into an error. `start` waits until `url`
    can be used, and `close` must be called.
    """

    def __init__(
        self,
        command: Sequence[str],
        suites: Sequence[str],
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        shares_stderr: bool = False,
    ) -> None:
        self.url = ""
        self._shares_stderr = shares_stderr
        stop_seconds = float(settings.get("drain_seconds", DRAIN_SECONDS)) + STOP_SECONDS
        words = [*command, "serve", *options(suites, {"port": 0, **settings})]
        self._folder = Path(tempfile.mkdtemp(prefix="decathlon-server-"))
        guard = [sys.executable, "-I", "-c", _GUARD, str(self._folder), str(stop_seconds)]
        try:
            with (self._folder / "log").open("wb") as server_log:
                self._process = subprocess.Popen(
                    [*guard, *words, "--ready-file", str(self._folder / "url")],
                    bufsize=0,  # a fork closes the pipe too, and could wait for a buffer's lock for ever
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=None if shares_stderr else server_log,
                    env=environment,
                    cwd=cwd,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the server
                )
            _open.add(self)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def status(self) -> int | None:
        """The exit status of a server that has ended; None while it runs."""
        return self._process.poll()

    def start(self) -> str:
        """Wait until the server is ready; returns its URL. Raises ClientError with the end of its log."""
        deadline = time.monotonic() + READY_SECONDS
        while not self.url:
            with suppress(FileNotFoundError):
                self.url = (self._folder / "url").read_text().strip()
            status = self.status
            if status is not None or time.monotonic() > deadline:
                what = f"ended with status {status}" if status is not None else "is not ready"
                log_text = (self._folder / "log").read_text(errors="replace").strip()
                without = "see its output" if self._shares_stderr else "it printed nothing"
                raise ClientError(
                    f"the server {what}: {log_text[-LOG_CHARACTERS:] or without}",
                    code="server_not_started",
                )
            time.sleep(POLL_SECONDS)
        log.info("A server runs at %s", self.url)
        return self.url

    def close(self) -> None:
        """End the server: its episodes are closed; claimed attempts are graded within `drain_seconds`."""
        with suppress(OSError, ValueError):  # it has ended; the pipe is closed, as in a fork
            # The end alone does not come while a fork without Python's hooks has the pipe too.
            self._stdin.write(b"\n")
        self.leave()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """Close the pipe whose end ends the server."""
        _open.discard(self)
        with suppress(OSError):
            self._stdin.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


@asynccontextmanager
async def child_server(server: ChildServer) -> AsyncGenerator[str]:
    """The URL of a server that is started now, and ended after the body. Raises as `ChildServer.start`."""
    try:
        # A thread that was left alone ends with the server.
        yield await anyio.to_thread.run_sync(server.start, abandon_on_cancel=True)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.close)


def _unshared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a server for one program.

    Nobody continues its episodes, so that it can share its state folder with other servers. Nobody reads its
    log, unless it does not start.
    """
    return {"survive_seconds": 0, "log_level": "warning", **settings}


class ChildEndpoint(HttpEndpoint):
    """A server that runs as long as a connection to it: `server=` of `tool_decathlon.ToolDecathlonEnv`."""

    def __init__(
        self, program: str | os.PathLike[str] | None, suites: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        super().__init__("http://127.0.0.1", "")  # its port is known once it runs
        self._program, self._suites, self._settings = program, suites, _unshared(settings)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        program = await anyio.to_thread.run_sync(find_program, self._program)
        async with child_server(ChildServer([program], self._suites, self._settings)) as self.root:
            yield


_of_process: dict[tuple[object, ...], ChildServer] = {}
_starting = threading.Lock()
_open: set[ChildServer] = set()
"""The servers of this process that it has not closed."""


def _after_fork() -> None:
    """In a fork: its parent's servers end with the parent, and no thread of the parent's has the lock."""
    global _starting  # noqa: PLW0603
    _starting = threading.Lock()
    for server in [*_open]:
        server.leave()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def server_of_this_process(
    program: str | os.PathLike[str] | None = None,
    suites: Sequence[str] = ("starter",),
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The URL of a server for all of this process, which is started now if it does not run and ends with it.

    `program`: see `find_program`. `settings`: see `ChildServer`. Raises ClientError.
    """
    settings = _unshared(settings or {})
    key = (os.getpid(), program, tuple(suites), repr(sorted(settings.items())))
    with _starting:
        if key not in _of_process:
            server = ChildServer([find_program(program)], suites, settings)
            try:
                server.start()
            except BaseException:
                server.close()
                raise
            _of_process[key] = server
            atexit.register(_close_own, os.getpid(), server)
        return _of_process[key].url


def _close_own(pid: int, server: ChildServer) -> None:
    # A fork has its parent's exit handlers too.
    if os.getpid() == pid:
        server.close()


def find_program(program: str | os.PathLike[str] | None) -> str:
    """The file of the server's program: `program`, or else beside this Python, or else on the PATH.

    Raises ClientError if there is none, or if it lacks the server's packages.
    """
    wanted = os.fspath(program) if program is not None else None
    own = Path(sys.executable).parent / COMMAND
    found = shutil.which(wanted) if wanted else str(own) if own.is_file() else shutil.which(COMMAND)
    if found is None or (not wanted and not _is_server(found)):
        missing = f"there is no program {wanted!r}" if wanted else "the server is not installed here"
        raise ClientError(
            f"{missing}; install it, in an environment of its own if this one's packages do not fit, and "
            "name the program: in the clone, python3 -m venv server && server/bin/pip install "
            f"'.[server,starter]', then server={'server/bin/' + COMMAND!r}; or name a running server by its "
            "URL",
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
        if isinstance(value, (list, tuple)):
            words += [word for one in cast("Sequence[Any]", value) for word in options((), {name: one})]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (str, int, float, Path)):
            words += [flag, str(value)]
        else:
            raise TypeError(f"{name}: a text, a number or a bool was expected, not {value!r}")
    return words


class EmbeddedEndpoint:
    """A server in this process. `settings` are the fields of `decathlon_mcp.settings.Settings`, by name."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._registry: EpisodeRegistry | None = None

    @property
    def registry(self) -> EpisodeRegistry:
        """The server; only while it runs."""
        assert self._registry is not None, "the embedded server is not running"
        return self._registry

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        # mcp 1.x next to the server's other packages fails with an ImportError that is not about a module.
        try:
            from decathlon_mcp.app import bootstrap
            from decathlon_mcp.errors import DecathlonError
            from decathlon_mcp.settings import read_settings
        except ImportError as error:
            raise ClientError(f"{MISSING_SERVER} ({error})", code="server_not_installed") from error

        try:
            async with bootstrap(read_settings(self._settings)) as self._registry:
                yield
        except DecathlonError as error:
            raise error_from_code(error.code, error.message, error.data) from error

    def address(self, episode: str | None) -> str:
        return "the lobby in this process" if episode is None else "an episode in this process"

    @asynccontextmanager
    async def open_session(self, owner: SessionOwner, episode: str | None) -> AsyncGenerator[Session]:
        from decathlon_mcp.errors import DecathlonError
        from decathlon_mcp.protocol.stdio import serve_lines

        registry, ended = self.registry, anyio.Event()
        async with create_client_server_memory_streams() as ((read, write), server_streams):

            async def serve() -> None:
                received, sent = server_streams
                try:
                    await serve_lines(registry, lines_of(received), line_writer(sent), episode=episode)
                except DecathlonError as error:
                    owner.lose(error_from_code(error.code, error.message, error.data))
                finally:
                    ended.set()
                    await sent.aclose()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                async with Session(read, write) as session:
                    yield session
                # The closed stream ends the server's side, which may still have to close an episode.
                await write.aclose()
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    await ended.wait()
                tasks.cancel_scope.cancel()


async def lines_of(received: Any) -> AsyncGenerator[bytes]:
    """The messages of one of the SDK's streams as lines of JSON."""
    async for item in received:
        if not isinstance(item, Exception):
            yield item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()


def line_writer(sent: Any) -> Callable[[bytes], Awaitable[None]]:
    """A function that sends lines of JSON on one of the SDK's streams. Raises OSError if it is closed."""
    # mcp 1.x has no such package; but the server, which is here, requires 2.0.
    from mcp_types.jsonrpc import jsonrpc_message_adapter

    async def write(line: bytes) -> None:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        try:
            await sent.send(SessionMessage(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise OSError("the session has ended") from error

    return write
