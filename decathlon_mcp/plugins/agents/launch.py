"""Runs a program for one episode: in namespaces, or as an ordinary process that is trusted.

Either way its parent is `program_starter`, which ends with everything that the program has
started when this process ends, whatever the reason.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, PIPE, STDOUT
from typing import TypeAlias

import anyio
from anyio.abc import ByteReceiveStream, Process

from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, DecathlonError, ProviderUnavailableError
from decathlon_mcp.http.listening import listen
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.agents.agent_programs import (
    PRESETS,
    Configuration,
    Program,
    configure,
)
from decathlon_mcp.plugins.agents.reach import Endpoint, hosts_file, without_proxies
from decathlon_mcp.plugins.agents.serving import PATH
from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.host.command import isolated_command
from decathlon_mcp.sandboxes.host.host_files import HostFiles, own_python
from decathlon_mcp.sandboxes.host.namespaces import SET_UP_SECONDS
from decathlon_mcp.sandboxes.host.network import open_namespaces
from decathlon_mcp.sandboxes.host.processes import ProcessId

ROOT = PurePosixPath("/agent")
"""Folder in the namespaces with the program's home, its configuration and the folder that it starts in."""
FIRST_PORT = 8765
"""Of the episode in the namespaces; the next one if the program's model has it."""
LISTEN_SECONDS = 30.0
"""Limit on a program that takes 50 ms."""
END_SECONDS = 5.0
"""How long the starter may take to kill what the program has started, before it is killed itself."""
_STARTING = b"2"
"""What the starter sends before it starts the program, and alone if it could."""
_OUTPUT_BYTES = 4096
VERSION_SECONDS = 30.0
"""How long a program may take to print its version; Node's take a second or two."""
VERSION_BYTES = 4096
"""How much of what it prints is read."""
_VERSION = re.compile(rb"\d+(?:\.\d+){1,3}(?:-[0-9A-Za-z.]+)?")
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Where a program is going to run."""

    root: PurePosixPath
    """The folder with its home, its configuration and the folder that it starts in."""
    port: int
    """The port of the episode's address there."""
    path: str
    """The path of this address."""
    listener: socket.socket | None = None
    """The socket at this address, if it is this process's own."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A program that was started. `listeners`: the episode's, then one for each endpoint of its model."""

    process: Process
    listeners: Sequence[socket.socket]
    _channel: socket.socket

    @property
    def output(self) -> ByteReceiveStream:
        """Its stdout and stderr."""
        assert self.process.stdout is not None
        return self.process.stdout

    async def wait(self) -> int | None:
        """Wait for its end; the exit status, as a shell has it. None if the program was never started."""
        code = await self.process.wait()
        try:
            signs = self._channel.recv(16)
        except OSError:
            signs = b""
        if signs != _STARTING:
            return None
        return code if code >= 0 else 128 - code


class NamespaceLauncher:
    """Runs programs that see this machine's own programs and their own, but nothing else of it.

    They reach their episode and these endpoints. `hidden`: folders that are empty for them in any case. The
    constructor blocks: it searches what programs see for traces of `hidden`. Raises ProviderUnavailableError.
    """

    isolation = "namespaces"

    def __init__(self, program: Program, endpoints: Sequence[Endpoint], hidden: Collection[Path]) -> None:
        self.endpoints = endpoints
        self._path = program.path
        self._files = HostFiles.for_program(hidden, program.prefixes, program.folders, hosts_file(endpoints))

    @contextmanager
    def location(self) -> Generator[RunLocation]:
        taken = {endpoint.port for endpoint in self.endpoints if endpoint.inside == "127.0.0.1"}
        port = next(port for port in range(FIRST_PORT, FIRST_PORT + len(taken) + 1) if port not in taken)
        yield RunLocation(ROOT, port, PATH)

    @asynccontextmanager
    async def start(
        self, location: RunLocation, configuration: Configuration
    ) -> AsyncGenerator[RunningProgram]:
        """Start a program; on exit it is killed, with all that it has started. Raises DecathlonError."""
        path = os.pathsep.join(map(str, (*self._path, self._files.environment["PATH"])))
        environment = {**without_proxies(configuration.environment), "PATH": path}
        addresses = [("127.0.0.1", location.port), *((each.inside, each.port) for each in self.endpoints)]
        with ExitStack() as stack, _channel() as (ours, theirs):
            command = tuple(_starter_command(str(own_python()), theirs))
            # Its limits are for the size of its folders only.
            spec = SandboxSpec(f"agent-{secrets.token_hex(8)}", command, ROOT, limits=Limits())
            isolated = stack.enter_context(isolated_command(spec, self._files))
            async with _starter(isolated.argv, isolated.descriptors, ours, theirs) as process:
                listeners = await _open_listeners(isolated.first_process, addresses, isolated.launcher)
                for listener in listeners:
                    stack.enter_context(listener)
                await _send(ours, replace(configuration, environment=environment))
                yield RunningProgram(process, listeners, ours)


async def _open_listeners(
    first_process: ProcessId, addresses: Sequence[tuple[str, int]], launcher: Sequence[str]
) -> list[socket.socket]:
    """Listening sockets at IPv4 addresses in the network of a sandbox, which has them from then on.

    `launcher`: a command line that executes the rest of it as the sandbox's user on this machine. Raises
    SandboxLostError if the first process has ended, ProviderUnavailableError.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, ExitStack() as stack:
        user, network = open_namespaces(first_process, stack)
        # There it is root, and may open every port.
        enter = ["nsenter", "--preserve-credentials", f"--user=/proc/self/fd/{user}"]
        program = [f"--net=/proc/self/fd/{network}", "--", *_starter_command(sys.executable, theirs)]
        command = [*launcher, *enter, *program, json.dumps(addresses)]
        try:
            with anyio.fail_after(LISTEN_SECONDS):
                result = await anyio.run_process(
                    command, check=False, cwd="/", pass_fds=(user, network, theirs.fileno())
                )
        except (OSError, TimeoutError) as error:
            raise ProviderUnavailableError(f"nsenter cannot be run: {error or 'it does not end'}") from error
        if result.returncode:
            reason = " ".join(result.stderr.decode("utf-8", "replace").split())[-_OUTPUT_BYTES:]
            raise ProviderUnavailableError(f"the sandbox's network could not be prepared: {reason}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, len(addresses))
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]


class TrustedLauncher:
    """Runs programs as ordinary processes, which can do whatever this user can.

    Their homes and configurations are in temporary folders.
    """

    isolation = "none"
    endpoints: Sequence[Endpoint] = ()

    @contextmanager
    def location(self) -> Generator[RunLocation]:
        with (
            tempfile.TemporaryDirectory(prefix="decathlon-agent-", ignore_cleanup_errors=True) as folder,
            listen("127.0.0.1", 0) as listener,
        ):
            # Other users of this machine reach the port, but do not know the path.
            path = f"/{secrets.token_urlsafe(24)}{PATH}"
            yield RunLocation(PurePosixPath(folder), listener.getsockname()[1], path, listener)

    @asynccontextmanager
    async def start(
        self, location: RunLocation, configuration: Configuration
    ) -> AsyncGenerator[RunningProgram]:
        """As `NamespaceLauncher.start`."""
        with _channel() as (ours, theirs):
            async with _starter(_starter_command(sys.executable, theirs), (), ours, theirs) as process:
                await _send(ours, replace(configuration, remove=str(location.root)))
                yield RunningProgram(process, (), ours)


Launcher: TypeAlias = NamespaceLauncher | TrustedLauncher


def _starter_command(python: str, channel: socket.socket) -> list[str]:
    """The command of `program_starter` with its end of a channel."""
    return [python, "-I", "-S", "-c", source("program_starter", __package__ or ""), str(channel.fileno())]


@contextmanager
def _channel() -> Generator[tuple[socket.socket, socket.socket]]:
    """A pair of sockets: this process's, and the starter's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


@asynccontextmanager
async def _starter(
    argv: Sequence[str], descriptors: Sequence[int], ours: socket.socket, theirs: socket.socket
) -> AsyncGenerator[Process]:
    """A starter that waits for its order. Raises DecathlonError if it does not come up."""
    process = await anyio.open_process(
        argv,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath)},
        pass_fds=(*descriptors, theirs.fileno()),
    )
    try:
        theirs.close()
        await _wait_until_up(process, ours)
        yield process
    finally:
        ours.close()  # the sign for the starter
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(END_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
            with anyio.move_on_after(END_SECONDS):
                await process.aclose()


async def _wait_until_up(process: Process, channel: socket.socket) -> None:
    with anyio.move_on_after(SET_UP_SECONDS):
        await anyio.wait_readable(channel)
        with suppress(ConnectionResetError):
            if channel.recv(1):
                return
        output = b""
        assert process.stdout is not None
        async for chunk in process.stdout:
            output = (output + chunk)[-_OUTPUT_BYTES:]
        text = " ".join(output.decode("utf-8", "replace").split())
        raise DecathlonError(f"the program was not started: {text or 'its parent ended without a word'}")
    raise DecathlonError(f"the program was not started within {SET_UP_SECONDS:g} s")


async def _send(channel: socket.socket, configuration: Configuration) -> None:
    line = json.dumps(asdict(configuration)).encode() + b"\n"
    try:
        while line:
            await anyio.wait_writable(channel)
            line = line[channel.send(line) :]
    except OSError as error:
        raise DecathlonError(f"the program was not started: {error.strerror}") from error


async def check_version(program: Program, launcher: Launcher, variables: Mapping[str, str]) -> str | None:
    """The version of a known program, asked where its attempts will run; None for another program.

    Warns of a version that was not checked, whose own tools may not all be off: in namespaces they reach
    nothing of this machine. Raises BadRequestError if they would, for a program that is trusted.
    """
    preset = PRESETS.get(program.name)
    if preset is None:
        return None
    version = await _ask(program, launcher, variables)
    if version == preset.version:
        return version
    what = f"{program.name} {version}" if version else f"{program.name}, which did not say its version,"
    checked = (
        f"its own tools were checked in {preset.version} (npm install -g {preset.package}@{preset.version})"
    )
    if isinstance(launcher, TrustedLauncher):
        raise BadRequestError(
            f"{what} may have tools of its own that act on this machine, outside of the task's sandbox: "
            f"{checked}. Install that version, or leave --trust-command out"
        )
    report(
        f"warning: {what} may offer its model tools of its own, which do not reach the task: {checked}. Look "
        "at what the model was offered before you compare rewards"
    )
    return version or UNKNOWN


async def _ask(program: Program, launcher: Launcher, variables: Mapping[str, str]) -> str | None:
    output = b""
    with anyio.move_on_after(VERSION_SECONDS), launcher.location() as location:
        configuration = configure(
            (program.command[0], "--version"),
            location.root,
            address=location.address,
            prompt="",
            tool_seconds=VERSION_SECONDS,
            variables=variables,
        )
        async with launcher.start(location, configuration) as running:
            async for chunk in running.output:
                output += chunk
                if len(output) >= VERSION_BYTES:
                    break
    found = _VERSION.search(output[:VERSION_BYTES])
    return None if found is None else found[0].decode()
