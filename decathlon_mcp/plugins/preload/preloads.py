"""The preloaders of a server: their imports are learnt, and the drivers of sandboxes ask them for forks.

Decided 2026-11-28: servers are forked outside of their sandboxes, and not within each. A process in a sandbox
that has imported the libraries pays for a task with several servers of the same Python only, and costs an
import in each sandbox; 1,024 sandboxes with a server each would take as long as before.

Decided 2026-11-28: one process for each program, not for each Python. So a fork has no module that the server
would not have imported itself, in the same order, and the interpreter was started with the same options,
variables and command line.

A driver can only name a server of its own task. Everything else is decided here, by the definitions of the
suite: what is imported outside of sandboxes never depends on what an agent does. A server's imports are
learnt at a set-up, before the agent can act.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from decathlon_sandbox import wire

from decathlon_mcp.background import run_alone
from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.registry import RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError, SettingsError
from decathlon_mcp.plugins.preload.forkable_programs import NotPythonError, Program, program_of
from decathlon_mcp.plugins.preload.libraries import (
    KeptLibraries,
    Libraries,
    digest_of,
    find_libraries,
    read_imports,
)
from decathlon_mcp.plugins.preload.preloader import Preloader, PreloaderError
from decathlon_mcp.plugins.settings import PreloadSettings
from decathlon_mcp.sandboxes.host.mounts import RootFiles
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.sandboxes.host.sandbox_folder import closing_descriptor
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import fields

MAX_PRELOADERS = 64
"""Each has some 60 MiB."""
WAIT_SECONDS = 25.0
"""How long a start waits for the libraries of its program, less than the driver does."""
RESTART_SECONDS = 1.0
MAX_RESTARTS = 10
REQUESTS_PER_SECOND, REQUESTS_BURST = 1.0, 64.0
"""Starts of a sandbox that are considered; beyond that, its servers start by themselves."""
_REQUEST_BYTES = 1024
_MOST_DESCRIPTORS = 253
"""Of one message, in Linux (SCM_MAX_FD). The kernel closes those for which there is no room."""
MAX_CLOSING = 16
"""Descriptors of a sandbox that are being closed. With more, its servers start by themselves."""

log = logging.getLogger("decathlon.preload")


def create(
    settings: Settings, options: RegistryOptions, factories: Mapping[str, SandboxFactory]
) -> Preloads | None:
    """The preloaders of a server with these settings. Raises SettingsError."""
    if not settings.of(PreloadSettings).preload:
        return None
    providers = {id(provider): provider for factory in factories.values() if (provider := factory.provider)}
    preloads = Preloads(settings.state)
    found = [provider for provider in providers.values() if isinstance(provider, HostProvider)]
    if not found:
        raise SettingsError("--preload: only sandboxes of the provider host have servers that are forks")
    for provider in found:
        provider.connect(preloads.channel, preloads.run)
    return preloads


@dataclass(slots=True, eq=False)
class Kind:
    """A program, and what is known of its libraries."""

    program: Program
    files: RootFiles
    script: Path | None
    """The program's script on this machine, if it is the suite's."""
    process: Preloader | None = None
    """From which its servers are forked."""
    is_learning: bool = False
    why_cold: str | None = None
    """Why its servers start by themselves, for as long as this server runs."""
    restarts: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)
    """Set, and replaced, when one of these changes."""

    @property
    def key(self) -> str:
        """Identifies the program, and whose script it is: suites may have different programs of one name."""
        return self.program.key if self.script is None else f"{self.program.key} {self.script}"

    def settle(self) -> None:
        """Say that what is known has changed, and that nothing is being learnt."""
        self.is_learning = False
        self.changed.set()
        self.changed = anyio.Event()


@dataclass(slots=True, eq=False)
class Closing:
    """Closes what the driver of one sandbox has sent, each in a thread of its own.

    The last one to close a TCP socket may wait for its peer for hours (SO_LINGER), and so may the last one to
    close a socket in whose queue is another.
    """

    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    @property
    def is_full(self) -> bool:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads) >= MAX_CLOSING

    def close(self, *descriptors: int) -> None:
        def close() -> None:
            for descriptor in descriptors:
                with suppress(OSError):  # of its file, as on a disk that is full; it is closed
                    os.close(descriptor)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        self._threads.append(thread)


@dataclass(slots=True, eq=False)
class SetUp:
    """An episode whose sandbox is being set up. `ended` is set when it is over; `succeeded` says how."""

    ended: anyio.Event = field(default_factory=anyio.Event)
    succeeded: bool = False


class Preloads(EpisodeHooks):
    """The preloaders of one server."""

    def __init__(self, state: Path) -> None:
        self._kept = KeptLibraries(state)
        self.kinds: dict[str, Kind] = {}
        self._set_ups: dict[SetUp, Start] = {}
        self._agents: dict[str, Start] = {}
        self._noted: set[tuple[str, str]] = set()
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Serve drivers until it is cancelled; no process is left then."""
        try:
            async with anyio.create_task_group() as self._tasks:
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            for kind in self.kinds.values():
                if kind.process is not None:
                    await kind.process.close()

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        set_up = SetUp()
        self._set_ups[set_up] = start
        try:
            agent = await following()
            set_up.succeeded = True
        finally:
            del self._set_ups[set_up]
            set_up.ended.set()
        name = agent.sandbox.spec.name
        self._agents[name] = start
        start.stack.callback(self._agents.pop, name, None)
        return agent

    def channel(self, sandbox: NamespaceSandbox) -> socket.socket | None:
        """A new socket for the driver of a sandbox, which the caller closes; None: it gets none."""
        if self._tasks is None:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._tasks.start_soon(run_alone, self._follow, sandbox, ours)
        return theirs

    async def _follow(self, sandbox: NamespaceSandbox, requests: socket.socket) -> None:
        """Answer the requests of a driver, and note why forks gave up, until its sandbox is gone."""
        bucket = wire.TokenBucket(per_second=REQUESTS_PER_SECOND, burst=REQUESTS_BURST)
        closing = Closing()
        try:
            while not closing.is_full:
                await anyio.wait_readable(requests)
                try:
                    message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, _MOST_DESCRIPTORS)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                if not message:
                    return
                name, _, reason = message.decode("utf-8", "replace").partition("\0")
                is_considered = bucket.take()
                if is_considered and reason:
                    self.note(name, reason.removeprefix("cold "))
                if is_considered and not reason and len(descriptors) == 1 and self._tasks is not None:
                    self._tasks.start_soon(run_alone, self._answer, sandbox, name, descriptors[0], closing)
                elif descriptors:
                    closing.close(*descriptors)
        finally:
            closing.close(requests.detach())

    async def _answer(self, sandbox: NamespaceSandbox, server: str, channel: int, closing: Closing) -> None:
        """Let a server be a fork, or close the channel, at which its driver starts it."""
        try:
            with anyio.move_on_after(WAIT_SECONDS):
                kind, set_up = await self.kind_of(sandbox, server)
                if kind.process is None and not kind.is_learning and kind.why_cold is None and set_up:
                    await self._learn(kind, set_up, sandbox, server, channel)
                    return
                if kind.process is not None:
                    await kind.process.fork_into(sandbox, channel)
                    return
                self.note(server, kind.why_cold or "its libraries are not known yet")
                return
            self.note(server, "its libraries were not imported in time")
        except NotPythonError as error:
            self.note(server, str(error))
        except (OSError, DecathlonError, PreloaderError) as error:
            self.note(server, f"it could not be forked: {error}")
        finally:
            closing.close(channel)

    def note(self, server: str, reason: str) -> None:
        if (server, reason) not in self._noted and len(self._noted) < 1000:
            self._noted.add((server, reason))
            log.info("A server starts without preloaded libraries", extra=fields(server=server, why=reason))

    async def kind_of(self, sandbox: NamespaceSandbox, server: str) -> tuple[Kind, SetUp | None]:
        """What a server of a sandbox is, and the set-up in which that is. Raises NotPythonError."""
        name = sandbox.spec.name
        set_up, start = next(
            ((one, of) for one, of in self._set_ups.items() if of.episode.records.progress.agent == name),
            (None, self._agents.get(name)),
        )
        if start is None:
            raise NotPythonError("its sandbox is no agent's")
        suite = start.episode.sandbox_factory.suite
        specs = suite.all_server_specs(root=sandbox.root)
        spec = next((spec for spec in specs if spec["name"] == server), None)
        if spec is None:
            raise NotPythonError("it is no server of the suite")
        files = sandbox.files
        merged = sandbox.spec.merge_pages
        program = await to_thread.run_sync(partial(program_of, spec, files, merged=merged))
        script = None
        if program.script and PurePosixPath(program.script).is_relative_to(sandbox.root):
            script = suite.path / PurePosixPath(program.script).relative_to(sandbox.root)
        asked = Kind(program, files, script)
        kind = self.kinds.get(asked.key)
        if kind is None:
            if len(self.kinds) >= MAX_PRELOADERS:
                raise NotPythonError(f"there are {MAX_PRELOADERS} preloaders")
            kind = self.kinds[asked.key] = asked
            kind.is_learning = True
            assert self._tasks is not None
            # Not for this request alone, which may end before.
            self._tasks.start_soon(run_alone, self._recall, kind, server)
        while kind.is_learning:
            await kind.changed.wait()
        return kind, set_up

    async def _recall(self, kind: Kind, server: str) -> None:
        """Preload what was learnt before."""
        try:
            digest = await self._digest(kind)
            if (libraries := self._kept.get(kind.key, digest)) is not None:
                await self.preload(kind, libraries)
        except (OSError, PreloaderError, DecathlonError) as error:
            self._fail(kind, server, str(error))
        finally:
            kind.settle()

    async def _digest(self, kind: Kind) -> str:
        return await to_thread.run_sync(digest_of, kind.program, kind.files, kind.script)

    async def _learn(
        self, kind: Kind, set_up: SetUp, sandbox: NamespaceSandbox, server: str, channel: int
    ) -> None:
        """Let a server that is a fork of an empty interpreter report what it imports."""
        kind.is_learning = True
        try:
            async with AsyncExitStack() as stack:
                digest = await self._digest(kind)
                report, write_end = os.pipe()
                stack.callback(os.close, report)
                with closing_descriptor(write_end):
                    process = Preloader.start(kind.program, kind.files, (), report=write_end)
                stack.push_async_callback(process.close)
                await process.wait_until_ready()
                await process.fork_into(sandbox, channel)
                opened = stack.pop_all()
        except BaseException as error:
            kind.settle()
            if isinstance(error, Exception):
                self._fail(kind, server, str(error))
            raise
        assert self._tasks is not None
        self._tasks.start_soon(run_alone, self._finish_learning, kind, set_up, server, opened, report, digest)

    async def _finish_learning(
        self, kind: Kind, set_up: SetUp, server: str, opened: AsyncExitStack, report: int, digest: str
    ) -> None:
        try:
            async with opened:
                imported = await read_imports(report, set_up.ended)
            await set_up.ended.wait()
            if not set_up.succeeded:
                kind.settle()
                return
            libraries, left_out = await find_libraries(kind.program, kind.files, digest, imported)
            for name, reason in left_out.items():
                log.info("A library is not preloaded", extra=fields(server=server, library=name, why=reason))
            await to_thread.run_sync(self._kept.keep, kind.key, libraries)
            await self.preload(kind, libraries)
        except (OSError, PreloaderError, DecathlonError) as error:
            self._fail(kind, server, str(error))

    def _fail(self, kind: Kind, server: str, reason: str) -> None:
        kind.why_cold = reason
        kind.settle()
        log.warning("The libraries of a server cannot be preloaded", extra=fields(server=server, why=reason))

    async def preload(self, kind: Kind, libraries: Libraries) -> None:
        """Start the process from which a program's servers are forked, and follow it."""
        if not libraries.names:
            kind.why_cold = "it imports no libraries"
            kind.settle()
            return
        process = Preloader.start(kind.program, kind.files, libraries.names, reads=libraries.reads)
        try:
            await process.wait_until_ready()
        except BaseException:
            await process.close()
            raise
        kind.process = process
        kind.settle()
        assert self._tasks is not None
        self._tasks.start_soon(run_alone, self._watch, kind, process, libraries)

    async def _watch(self, kind: Kind, process: Preloader, libraries: Libraries) -> None:
        """Start it again when it has died."""
        await process.wait_until_ended()
        kind.process = None
        kind.settle()
        await process.close()
        log.warning("A preloader has ended and is started again", extra=fields(program=kind.program.command))
        if kind.restarts == MAX_RESTARTS:
            kind.why_cold = f"its preloader has ended {MAX_RESTARTS} times"
            return
        kind.restarts += 1
        await anyio.sleep(RESTART_SECONDS)
        with suppress(PreloaderError, OSError, DecathlonError):
            await self.preload(kind, libraries)
