"""The recording proxy as the server uses it: one `mitmdump` process for all episodes.

`mitmdump` is a program of its own, since its pinned dependencies exclude it from the server's environment. It
runs `addon.py`, which answers the server at the proxy's own ports (`exchanges.py`), and ends with the server.
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
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio import aclose_forcefully
from anyio.abc import ByteStream, Process, TaskStatus
from anyio.streams.buffered import BufferedByteReceiveStream

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.settings import WebSettings
from decathlon_mcp.plugins.web.exchanges import (
    MAX_LINE_BYTES,
    Configuration,
    Counts,
    EpisodeCounts,
    Listener,
    Ready,
    SessionSpec,
)
from decathlon_mcp.plugins.web.recording import BUSY_SECONDS
from decathlon_mcp.plugins.web.sandbox_session import SETTLE_SECONDS
from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import fields

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
"""mitmproxy's imports take seconds on a busy machine."""
REQUEST_SECONDS = SETTLE_SECONDS + BUSY_SECONDS
"""The addon answers at once, unless responses are still being recorded, or the recording's file is locked."""
STOP_SECONDS = 5.0
"""How long the process may take to end, and to say why, after the end of its input."""
RESTART_SECONDS = 1.0
"""Time between the end of a process that died and the start of the next one."""
OUTPUT_TAIL = 2000
_ADDON = Path(__file__).with_name("addon.py")

_PROCESS_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, anyio.BrokenResourceError),
    *(anyio.IncompleteRead, anyio.DelimiterNotFound),
)
"""What the end of a process that starts, or output that is not the addon's, causes."""


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


def check_program(settings: Settings) -> Iterator[Finding]:
    """The recording proxy can be run. Blocks."""
    own = settings.of(WebSettings)
    if own.web is None:
        return
    page = "docs/recorded-web.md#record"
    try:
        program = find_program(own.web_proxy)
        done = subprocess.run(
            # mitmproxy's imports take seconds on a busy machine.
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except SettingsError as error:
        yield Finding("web", False, error.message, page)
    except (OSError, subprocess.SubprocessError, UnicodeError) as error:
        yield Finding("web", False, f"the program of the proxy does not run: {error}", page)
    else:
        version = done.stdout.partition("\n")[0].strip()
        is_right = version.startswith("Mitmproxy")
        yield finding("web", is_right, f"{version} at {program}", f"{program} is another program")


class WebProxy:
    """The proxy, see `running_proxy`. `authority`: PEM certificate that sandboxes must trust."""

    def __init__(
        self, program: Path, state: Path, configuration: Configuration, authorities: Path | None
    ) -> None:
        self._program = program
        self._state = state
        self._configuration = configuration
        self._authorities = authorities
        self._process: Process | None = None
        """The process, while it listens."""
        self._ready: Ready | None = None
        self._sessions: dict[str, SessionSpec] = {}
        self._stderr = ""

    @property
    def authority(self) -> str:
        assert self._ready is not None, "the proxy has started"
        return self._ready.authority

    async def open(self, spec: SessionSpec) -> None:
        """Begin a session. Raises OSError if the proxy does not accept it."""
        await self._ask("open", **asdict(spec))
        self._sessions[spec.session] = spec

    async def connect(self, session: str, listener: Listener) -> ByteStream:
        """A connection of this session's sandbox to the proxy. Raises OSError."""
        stream, _ = await self._request("connect", listener, session=session)
        return stream

    async def counts(self, episode: str) -> EpisodeCounts:
        """How the requests of an episode were answered so far. Raises OSError."""
        return _counts(await self._ask("counts", episode=episode))

    async def close(self, episode: str) -> EpisodeCounts:
        """End an episode's sessions. Raises OSError."""
        for session, spec in tuple(self._sessions.items()):
            if spec.episode == episode:
                del self._sessions[session]
        return _counts(await self._ask("close", episode=episode))

    async def _ask(self, do: str, **arguments: object) -> Mapping[str, Any]:
        stream, answer = await self._request(do, "proxy", **arguments)
        await stream.aclose()
        return answer

    async def _request(
        self, do: str, listener: Listener, **arguments: object
    ) -> tuple[ByteStream, Mapping[str, Any]]:
        """A connection that begins with a request, and the answer. Raises OSError."""
        assert self._ready is not None, "the proxy has started"
        if self._process is None or self._process.returncode is not None:
            # Somebody else may have its ports by now, who would get what sandboxes send.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the web proxy does not run")
        try:
            with anyio.fail_after(REQUEST_SECONDS):
                stream = await anyio.connect_tcp(*self._ready.listeners[listener])
                try:
                    await stream.send(f"{self._ready.token} ".encode() + _line({"do": do, **arguments}))
                    # Nothing follows an answer before the sandbox has sent something.
                    output = BufferedByteReceiveStream(stream)
                    answer = json.loads(await output.receive_until(b"\n", MAX_LINE_BYTES))
                except BaseException:
                    await aclose_forcefully(stream)
                    raise
        except (
            *(ValueError, TimeoutError, anyio.BrokenResourceError),
            *(anyio.IncompleteRead, anyio.DelimiterNotFound),
        ) as error:
            raise OSError(f"the web proxy does not answer: {type(error).__name__}") from None
        if "error" in answer:
            await aclose_forcefully(stream)
            raise OSError(f"the web proxy: {answer['error']}")
        return stream, answer

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Run the process, again after each time that it dies; it has started when it listens.

        Raises SettingsError if it does not start the first time.
        """
        started = False
        while True:
            try:
                async with self._running() as process:
                    if not started:
                        task_status.started()
                        started = True
                    async with anyio.create_task_group() as tasks:
                        for spec in tuple(self._sessions.values()):
                            tasks.start_soon(self._open_again, spec)
                    await process.wait()
            except _PROCESS_ERRORS as error:
                if not started:
                    output = self._stderr.strip()[-OUTPUT_TAIL:] or str(error) or type(error).__name__
                    raise SettingsError(f"{self._program} did not start: {output}") from None
            log.error(
                "the web proxy has ended and is started again", extra=fields(stderr=self._stderr[-200:])
            )
            await anyio.sleep(RESTART_SECONDS)

    async def _open_again(self, spec: SessionSpec) -> None:
        with suppress(OSError):
            await self._ask("open", **asdict(spec))

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[Process]:
        """Start the process and wait until it listens. It is gone on exit."""
        folder = await anyio.to_thread.run_sync(_authority_folder, self._state)
        self._stderr = ""
        scratch = await anyio.to_thread.run_sync(_copy_addon)
        command = self._command(folder, Path(scratch.name, _ADDON.name))
        process = await anyio.open_process(command, env=_environment(), start_new_session=True)
        assert process.stdin is not None, "it has pipes"
        assert process.stdout is not None, "it has pipes"
        stderr_ended = anyio.Event()
        try:
            async with background_tasks() as tasks:
                tasks.start_soon(self._keep_stderr, process, stderr_ended)
                output = BufferedByteReceiveStream(process.stdout)
                try:
                    with anyio.fail_after(START_SECONDS):
                        with suppress(anyio.BrokenResourceError):
                            await process.stdin.send(_line(asdict(self._configuration)))
                        self._ready = Ready(**json.loads(await output.receive_until(b"\n", MAX_LINE_BYTES)))
                except _PROCESS_ERRORS:
                    with anyio.move_on_after(STOP_SECONDS):
                        await stderr_ended.wait()  # it says why
                    raise
                await anyio.to_thread.run_sync(_protect, folder)
                self._process = process
                yield process
        finally:
            self._process = None
            with anyio.CancelScope(shield=True):
                await _end(process)
                await anyio.to_thread.run_sync(scratch.cleanup)

    def _command(self, authority: Path, addon: Path) -> list[str]:
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
        if self._authorities is not None:
            settings["ssl_verify_upstream_trusted_ca"] = str(self._authorities.expanduser().absolute())
        # Three addresses: two servers cannot both listen on port 0 of one. The hosts are placeholders.
        modes = (
            "regular@127.0.0.1:0",
            "reverse:http://web.invalid:80@127.0.0.2:0",
            "reverse:https://web.invalid:443@127.0.0.3:0",
        )
        return [
            str(self._program),
            "--quiet",
            *(part for mode in modes for part in ("--mode", mode)),
            *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
            "--scripts",
            str(addon),
        ]

    async def _keep_stderr(self, process: Process, ended: anyio.Event) -> None:
        assert process.stderr is not None, "it has pipes"
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in process.stderr:
                self._stderr = (self._stderr + chunk.decode("utf-8", "replace"))[-2 * OUTPUT_TAIL :]
        ended.set()


@asynccontextmanager
async def running_proxy(
    program: Path, state: Path, configuration: Configuration, authorities: Path | None = None
) -> AsyncGenerator[WebProxy]:
    """Run the proxy until the body ends. Raises SettingsError if it does not start.

    `program`: path of `mitmdump`. `authorities`: PEM file of the authorities for sites' certificates, by
    default mitmproxy's own list.
    """
    proxy = WebProxy(program, state, configuration, authorities)
    async with background_tasks() as tasks:
        await tasks.start(proxy.run)
        yield proxy


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _counts(answer: Mapping[str, Any]) -> EpisodeCounts:
    return EpisodeCounts(Counts(**answer["counts"]), answer["problem"])


def _copy_addon() -> tempfile.TemporaryDirectory[str]:
    """A copy of the addon that does not change with the installed package, in a folder of its own."""
    # mitmproxy watches its scripts. Loaded again after an upgrade, the addon would have no sessions.
    scratch = tempfile.TemporaryDirectory(prefix="decathlon-web-")
    shutil.copy(_ADDON, scratch.name)
    return scratch


def _environment() -> dict[str, str]:
    """The server's variables without its own settings and variables of its Python."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DECATHLON_")) and name != "VIRTUAL_ENV"
    }
    return {**inherited, PACKAGES_VARIABLE: str(_ADDON.parents[3])}


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
