"""The recording proxy as the server uses it: one `mitmdump` process for all episodes.

`mitmdump` is a program of its own, since its pinned dependencies exclude it from the server's environment. It
runs `addon.py`, and the two processes talk over its stdin and stdout (`control.py`). It ends with the server.
If it dies, it is started again; how often a sandbox has made each request is then counted from zero.

The key of the proxy's authority is in the state folder, readable by its owner only. Sandboxes get the
certificate.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, Process, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.web.control import MAX_LINE_BYTES, Configuration, Ready
from decathlon_mcp.web.exchanges import Counts, Mode, Part

log = logging.getLogger("decathlon.web")

PROGRAM = "mitmdump"
ENVIRONMENT = ".venv-mitmproxy"
"""Where `make mitmproxy` installs it, next to the server's own environment."""
INSTALL = (
    "install it with `make mitmproxy`, or with `uv tool install mitmproxy`, or name the program with "
    "--web-proxy"
)
PACKAGES_VARIABLE = "DECATHLON_WEB_PACKAGES"
"""The folder from which the addon imports this package."""
AUTHORITY_FOLDER = "web-authority"
START_SECONDS = 60.0
REQUEST_SECONDS = 30.0
STOP_SECONDS = 5.0
RESTART_SECONDS = 1.0
OUTPUT_TAIL = 2000
_ADDON = Path(__file__).with_name("addon.py")

_PROCESS_ERRORS = (OSError, anyio.IncompleteRead, anyio.DelimiterNotFound, TimeoutError, ValueError, KeyError)
"""What the end of the process, or output that is not the addon's, causes."""

Listener = Literal["proxy", "http", "https"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """`program`: path of `mitmdump`. `authorities`: PEM file of those that sites' certificates are checked
    with, by default mitmproxy's own list.
    """

    program: Path
    state: Path
    configuration: Configuration
    authorities: Path | None = None


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """One sandbox of an episode; `recording` is a file that exists."""

    id: str
    episode: str
    part: Part
    mode: Mode
    recording: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "do": "open",
            "session": self.id,
            "episode": self.episode,
            "part": self.part,
            "mode": self.mode,
            "recording": str(self.recording),
        }


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """`problem`: why something was not recorded, empty if nothing failed.

    `missed`: the most frequent requests without an answer, and how often each was made.
    """

    counts: Counts
    problem: str = ""
    missed: Mapping[str, int] = field(default_factory=dict[str, int])


def find_program(setting: Path | None) -> Path:
    """Path of `mitmdump`: as set, else in the environment next to the server's, else on the PATH.

    Raises SettingsError with the command that installs it.
    """
    if setting is not None:
        found = shutil.which(str(setting.expanduser()))
        if found is None:
            raise SettingsError(f"--web-proxy {setting} is not a program: {INSTALL}")
        return Path(found)
    own = Path(sys.prefix).with_name(ENVIRONMENT) / "bin" / PROGRAM
    found = str(own) if os.access(own, os.X_OK) else shutil.which(PROGRAM)
    if found is None:
        raise SettingsError(
            f"--web needs {PROGRAM} (mitmproxy 11 or later), which is not installed: {INSTALL}"
        )
    return Path(found)


@dataclass(slots=True)
class _Pending:
    answered: anyio.Event = field(default_factory=anyio.Event)
    answer: Mapping[str, Any] | None = None


class WebProxy:
    """The proxy while `running_proxy` is entered. `authority`: PEM certificate that sandboxes must trust."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._process: Process | None = None
        self._ready: Ready | None = None
        self._sessions: dict[str, SessionSpec] = {}
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._sending = anyio.Lock()
        self._stderr = ""

    @property
    def authority(self) -> str:
        assert self._ready is not None, "the proxy has started"
        return self._ready.authority

    async def open(self, spec: SessionSpec) -> None:
        """Begin a session. Raises OSError if the proxy does not accept it."""
        await self._request(spec.to_json())
        self._sessions[spec.id] = spec

    async def connect(self, session: str, listener: Listener) -> ByteStream:
        """A connection of this session's sandbox to the proxy. Raises OSError."""
        ready = self._ready
        if ready is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the web proxy does not run")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.bind(("127.0.0.1", 0))
            # Before it connects: the proxy closes connections that were not announced.
            await self._request({"do": "connect", "session": session, "port": connection.getsockname()[1]})
            code = connection.connect_ex(getattr(ready, listener))
            if code == errno.EINPROGRESS:
                await anyio.wait_writable(connection)
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            _raise_for(code)
            return await SocketStream.from_socket(connection)
        except BaseException:
            connection.close()
            raise

    async def counts(self, episode: str) -> EpisodeCounts:
        """How the requests of an episode were answered so far. Raises OSError."""
        return _counts(await self._request({"do": "counts", "episode": episode}))

    async def close(self, episode: str) -> EpisodeCounts:
        """End an episode's sessions. Raises OSError."""
        for session, spec in tuple(self._sessions.items()):
            if spec.episode == episode:
                del self._sessions[session]
        return _counts(await self._request({"do": "close", "episode": episode}))

    async def _request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise OSError("the web proxy does not run")
        self._last_id += 1
        number, pending = self._last_id, _Pending()
        self._pending[number] = pending
        try:
            async with self._sending:
                await process.stdin.send(json.dumps({"id": number, **message}).encode() + b"\n")
            with anyio.fail_after(REQUEST_SECONDS):
                await pending.answered.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError) as error:
            raise OSError(f"the web proxy does not answer: {type(error).__name__}") from None
        finally:
            del self._pending[number]
        if pending.answer is None:
            raise OSError("the web proxy has ended")
        if "error" in pending.answer:
            raise OSError(f"the web proxy: {pending.answer['error']}")
        return pending.answer

    async def run(self, started: anyio.Event) -> None:
        """Run the process, again after each time that it dies; `started` is set when it listens.

        Raises SettingsError if it does not start the first time.
        """
        while True:
            try:
                async with self._running() as lines:
                    if started.is_set():
                        await self._open_again()
                    started.set()
                    await self._read(lines)
            except _PROCESS_ERRORS as error:
                if not started.is_set():
                    output = self._stderr.strip()[-OUTPUT_TAIL:] or str(error) or type(error).__name__
                    raise SettingsError(f"{self._options.program} did not start: {output}") from None
            log.error(
                "the web proxy has ended and is started again", extra=fields(stderr=self._stderr[-200:])
            )
            await anyio.sleep(RESTART_SECONDS)

    async def _open_again(self) -> None:
        """Tell a new process the sessions of the old one."""
        process = self._process
        assert process is not None, "the process has just started"
        assert process.stdin is not None, "it has pipes"
        for spec in self._sessions.values():
            self._last_id += 1  # nobody waits for the answer
            await process.stdin.send(json.dumps({"id": self._last_id, **spec.to_json()}).encode() + b"\n")

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[BufferedByteReceiveStream]:
        """Start the process and wait until it listens; yields its output. It is gone on exit."""
        options = self._options
        folder = await anyio.to_thread.run_sync(_authority_folder, options.state)
        self._stderr = ""
        scratch = await anyio.to_thread.run_sync(_copy_addon)
        command = _command(options, folder, Path(scratch.name, _ADDON.name))
        process = await anyio.open_process(command, env=_environment(), start_new_session=True)
        assert process.stdin is not None, "it has pipes"
        assert process.stdout is not None, "it has pipes"
        stderr_ended = anyio.Event()

        async def keep_stderr() -> None:
            await self._keep_stderr(process)
            stderr_ended.set()

        try:
            async with background_tasks() as tasks:
                tasks.start_soon(keep_stderr)
                output = BufferedByteReceiveStream(process.stdout)
                try:
                    message = await self._configure(process, output)
                except _PROCESS_ERRORS:
                    with anyio.move_on_after(STOP_SECONDS):
                        await stderr_ended.wait()  # it says why
                    raise
                await anyio.to_thread.run_sync(_protect, folder)
                self._ready, self._process = Ready.from_json(message["ready"]), process
                yield output
        finally:
            self._process = None
            with anyio.CancelScope(shield=True):
                await _end(process)
                await anyio.to_thread.run_sync(scratch.cleanup)
            for pending in self._pending.values():
                pending.answered.set()

    async def _configure(self, process: Process, output: BufferedByteReceiveStream) -> Mapping[str, Any]:
        """Send the configuration; returns the first message."""
        assert process.stdin is not None, "it has pipes"
        configuration = json.dumps(self._options.configuration.to_json()).encode()
        with anyio.fail_after(START_SECONDS):
            with suppress(anyio.BrokenResourceError):
                await process.stdin.send(configuration + b"\n")
            return json.loads(await output.receive_until(b"\n", MAX_LINE_BYTES))

    async def _read(self, output: BufferedByteReceiveStream) -> None:
        """Deliver answers until the process ends."""
        while True:
            answer = json.loads(await output.receive_until(b"\n", MAX_LINE_BYTES))
            pending = self._pending.get(answer["id"])
            if pending is not None:
                pending.answer = answer
                pending.answered.set()

    async def _keep_stderr(self, process: Process) -> None:
        assert process.stderr is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in process.stderr:
                self._stderr = (self._stderr + chunk.decode("utf-8", "replace"))[-2 * OUTPUT_TAIL :]


@asynccontextmanager
async def running_proxy(options: ProxyOptions) -> AsyncGenerator[WebProxy]:
    """Run the proxy until the body ends. Raises SettingsError if it does not start."""
    proxy, started = WebProxy(options), anyio.Event()
    failure: list[SettingsError] = []
    async with background_tasks() as tasks:

        async def run() -> None:
            try:
                await proxy.run(started)
            except SettingsError as error:
                failure.append(error)
                started.set()

        tasks.start_soon(run)
        await started.wait()
        if failure:
            raise failure[0]
        yield proxy


def _raise_for(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def _counts(answer: Mapping[str, Any]) -> EpisodeCounts:
    missed = {str(request): int(count) for request, count in answer["missed"].items()}
    return EpisodeCounts(Counts.from_json(answer["counts"]), str(answer["problem"]), missed)


def _copy_addon() -> tempfile.TemporaryDirectory[str]:
    """A copy of the addon that does not change with the installed package, in a folder of its own."""
    # mitmproxy watches its scripts. Loaded again after an upgrade, the addon would have no sessions.
    scratch = tempfile.TemporaryDirectory(prefix="decathlon-web-")
    shutil.copy(_ADDON, scratch.name)
    return scratch


def _command(options: ProxyOptions, authority: Path, addon: Path) -> list[str]:
    settings = {
        "confdir": str(authority),
        # A site is asked only after the recording.
        "connection_strategy": "lazy",
        "upstream_cert": "false",
        "rawtcp": "false",
        "keep_host_header": "true",
        "onboarding": "false",
        # `connections.py` counts what a connection carries, one request after the other.
        "http2": "false",
        "http3": "false",
        "websocket": "false",
    }
    if options.authorities is not None:
        settings["ssl_verify_upstream_trusted_ca"] = str(options.authorities.expanduser().absolute())
    # Three addresses, because two servers cannot both listen on port 0 of one. The hosts are placeholders.
    modes = (
        "regular@127.0.0.1:0",
        "reverse:http://web.invalid:80@127.0.0.2:0",
        "reverse:https://web.invalid:443@127.0.0.3:0",
    )
    return [
        str(options.program),
        "--quiet",
        *(part for mode in modes for part in ("--mode", mode)),
        *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
        "--scripts",
        str(addon),
    ]


def _environment() -> dict[str, str]:
    """The server's variables without those of its Python and its own settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DECATHLON_")) and name != "VIRTUAL_ENV"
    }
    return {**inherited, PACKAGES_VARIABLE: str(_ADDON.parents[2])}


def _authority_folder(state: Path) -> Path:
    folder = state / AUTHORITY_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _protect(folder)
    return folder


def _protect(folder: Path) -> None:
    """Let only the owner read what is in the authority's folder."""
    folder.chmod(0o700)
    for file in folder.iterdir():
        if stat.S_ISREG(file.lstat().st_mode):
            file.chmod(0o600)


async def _end(process: Process) -> None:
    if process.stdin is not None:
        await process.stdin.aclose()
    with anyio.move_on_after(STOP_SECONDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.aclose()
