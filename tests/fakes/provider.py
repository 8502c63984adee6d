"""A provider whose sandboxes run in this process, for tests of the layers above providers.

    FakeProvider(tools={"files": {"echo": echo}})     # async def echo(call: FakeCall) -> str | Json
    FakeProvider(run=lambda request: 0 if "preprocess" in request.argv else 1)
    FakeProvider(faults=Faults(silent_on="call"))
    FakeProvider(faults=lambda spec: Faults(never_ready=spec.name.endswith("-grader")))

Sandboxes that survive their server are on a machine that two providers share:

    async with FakeMachine() as machine:
        async with FakeProvider("a", machine=machine) as provider, provider.open(spec) as sandbox:
            provider.die()
        async with FakeProvider("b", machine=machine) as provider, provider.reattach("a", spec) as sandbox:
            ...

It passes the same conformance checks as the real providers (`tests/sandboxes`).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream, TaskGroup

from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.driver.client import BOOT_COMMAND
from decathlon_mcp.errors import (
    BadRequestError,
    ProviderUnavailableError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.sandboxes.base import Finding, Isolation, LimitName, SandboxSpec, check_folder, finding
from decathlon_mcp.sandboxes.capabilities import Snapshot, Usage
from decathlon_mcp.sandboxes.streams import EndedStream, SocketStream
from tests.fakes.driver import FakeDriver, FakeProbe, FakeRun, Faults, ProcessExit, Run, Tools
from tests.fakes.tree import Tree

_CAUSE_SECONDS = 2.0
SAVED_FILE = "saved"


def _succeed(request: FakeRun) -> int:
    return 0


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _digest(image: str | None) -> str | None:
    return image if image is None or image.startswith("sha256:") else f"sha256:{image}"


class ProcessStream(ByteStream):
    """stdin and stdout of a first process, over the streams that servers attach one after the other.

    Without a server, output is dropped. Input ends with the first server, unless the sandbox survives.
    """

    def __init__(self, *, survives: bool) -> None:
        self._survives = survives
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._attached: SocketStream | None = None
        self._changed = anyio.Event()
        self._closed = False

    async def attach(self) -> SocketStream:
        """A new stream for the server; the one before ends."""
        await self._detach()
        self._sockets = socket.socketpair()
        server_end, self._attached = map(SocketStream, self._sockets)
        if self._closed:
            await self._detach()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        return server_end

    def drop(self) -> None:
        """Break the attached stream; what is on its way in either direction is lost."""
        for end in self._sockets or ():
            with suppress(OSError):
                while end.recv(1 << 16):
                    pass
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while True:
            changed, attached = self._changed, self._attached
            if attached is not None:
                with suppress(anyio.EndOfStream, anyio.ClosedResourceError):
                    return await attached.receive(max_bytes)
            if not self._survives:
                raise anyio.EndOfStream
            if attached is self._attached:
                await self._detach()
            await changed.wait()

    async def send(self, item: bytes) -> None:
        if self._attached is not None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._attached.send(item)
                return
        if not self._survives:
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        self._closed = True
        await self._detach()

    async def _detach(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            await attached.aclose()


class FakeContainer:
    """What a machine has of one sandbox, whichever provider has it open."""

    def __init__(self, owner: str, spec: SandboxSpec, faults: Faults, saved_tree: Tree | None = None) -> None:
        self.owner = owner
        self.spec = spec
        self.faults = faults
        self.process_stream = ProcessStream(survives=spec.survives)
        self.tree = Tree(saved_tree)
        self.tree.make(spec.root)
        self.first_process: FakeDriver | FakeProbe | None = None
        self.exit: ProcessExit | None = None
        self.paused = False
        self.finished = anyio.Event()
        self._process = CancelScope()

    async def run(self, first_process: FakeDriver | FakeProbe) -> None:
        """Run the first process. Close its end of the stream when it ends, but not when it is paused."""
        self.first_process = first_process
        try:
            with self._process:
                self.exit = await first_process.run()
        finally:
            if not self.paused:
                await self.process_stream.aclose()
            self.finished.set()

    async def stop(self, exit_: ProcessExit | None = None) -> None:
        """Stop the first process, for good. `exit_`: how it ended."""
        self.exit = self.exit or exit_
        self._process.cancel()
        with CancelScope(shield=True):
            await self.finished.wait()


class FakeSandbox:
    """Implements `base.Sandbox`. Tests can read and write its file system, `tree`."""

    log_tail = ""

    def __init__(self, provider: FakeProvider, container: FakeContainer, stream: ByteStream) -> None:
        self.container = container
        self.stream = stream
        self._provider = provider
        self._closed = False

    @property
    def spec(self) -> SandboxSpec:
        return self.container.spec

    @property
    def tree(self) -> Tree:
        return self.container.tree

    @property
    def merges(self) -> bool:
        """Whether its memory is merged with that of others."""
        driver = self.container.first_process
        return isinstance(driver, FakeDriver) and driver.merges

    @property
    def exit(self) -> ProcessExit | None:
        return self.container.exit

    @exit.setter  # noqa: A003  (a setter must have the property's name)
    def exit(self, exit_: ProcessExit) -> None:
        self.container.exit = exit_

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    @property
    def image_digest(self) -> str | None:
        return _digest(self.spec.image)

    @property
    def max_snapshot_bytes(self) -> int:
        return self._provider.saved_bytes

    async def snapshot(self, folder: Path) -> Snapshot:
        """See `SavedSandbox`, for a first process that is a driver. The machine has what is saved."""
        self._check(self.root)
        driver = self.container.first_process
        assert isinstance(driver, FakeDriver)
        await anyio.lowlevel.checkpoint()
        if (error := self.container.faults.snapshot_error) is not None:
            raise error
        saved = self._provider.machine.saved
        await anyio.Path(folder).mkdir(mode=0o700)
        padding = b" " * self._provider.saved_bytes
        await anyio.Path(folder / SAVED_FILE).write_bytes(f"{len(saved):<10}".encode() + padding[10:])
        saved.append((Tree(self.tree), dict(driver.servers)))
        return Snapshot(folder)

    async def reopen(self) -> None:
        self._check(self.root)
        self._provider.check_available()
        await self.stream.aclose()
        if self.container.paused or self.container.finished.is_set():
            raise SandboxLostError("the sandbox's first process has ended or is paused")
        self.stream = await self.container.process_stream.attach()

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        self._check(folder)
        await anyio.lowlevel.checkpoint()
        _raise(self.container.faults.put_error)
        self.tree.put(folder, archive)

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        self._check(folder)
        await anyio.lowlevel.checkpoint()
        _raise(self.container.faults.get_error)
        self.tree.get(folder, archive, limit_bytes)

    async def pause(self) -> None:
        self._check(self.root)
        if self.exit is not None:
            raise SandboxLostError("the sandbox's first process has ended")
        _raise(self.container.faults.pause_error)
        self.container.paused = True
        await self.container.stop()

    async def cause_of_end(self) -> str | None:
        ended = isinstance(self.stream, SocketStream) and self.stream.ended.is_set()
        if ended and not self.container.paused:
            with anyio.move_on_after(_CAUSE_SECONDS):
                await self.container.finished.wait()
        if self.exit is None:
            return None
        return "out of memory" if self.exit.out_of_memory else f"exit code {self.exit.exit_code}"

    async def is_running(self) -> bool:
        return self.exit is None and not self.container.paused

    async def usage(self, sandboxes: int) -> Usage:
        return self.container.faults.usage

    async def end(self) -> None:
        """Kill the first process, paused or not."""
        self._closed = True
        await self.container.stop()

    async def lose(self, exit_code: int = 137, *, out_of_memory: bool = False) -> None:
        """Kill the first process from outside: for its server, the sandbox is lost."""
        await self.container.stop(ProcessExit(exit_code, out_of_memory=out_of_memory))

    def break_stream(self) -> None:
        """Break the stream; what is on its way in either direction is lost."""
        self.container.process_stream.drop()

    def _check(self, folder: PurePosixPath) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")
        check_folder(folder)


class FakeMachine:
    """A machine that several providers can share, with the sandboxes of all of them.

    Entered (`async with`), it runs their first processes, which then outlive the providers.
    """

    def __init__(self) -> None:
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.saved: list[tuple[Tree, dict[str, bool]]] = []
        """The files and the servers of sandboxes that were saved."""
        self.tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self.tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.tasks is not None
        self.tasks.cancel_scope.cancel()
        await self.tasks.__aexit__(None, None, None)


class FakeProvider:
    """Opens sandboxes in this process.

    `run` returns the result of a process; by default exit code 0. `opened` has all sandboxes that this
    provider opened or took back, `machine.sandboxes` those that are still there. `starts`: the names of the
    servers that were started, or tried to, in order. While `unavailable` is set, there is no engine.
    """

    name = "fake"

    def __init__(
        self,
        owner: str = "fake",
        *,
        tools: Tools | None = None,
        run: Run = _succeed,
        faults: Faults | Callable[[SandboxSpec], Faults] | None = None,
        machine: FakeMachine | None = None,
        isolation: Isolation = "container",
    ) -> None:
        self.saved_bytes = 10
        self.isolation: Isolation = isolation
        self.unlimited: tuple[LimitName, ...] = ()
        self.machine = machine or FakeMachine()
        self.opened: list[FakeSandbox] = []
        self.starts: list[str] = []
        self.unavailable = False
        self._dead = False
        self._owner = owner
        self._tools: Tools = tools or {}
        self._run = run
        self._faults = faults or Faults()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return spec.root

    async def environment(self, image: str | None) -> str | None:
        return None if self.unavailable else _digest(image)

    @property
    def is_available(self) -> bool:
        return not self.unavailable

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return False

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[FakeSandbox]:
        async with self._open(spec) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def _open(self, spec: SandboxSpec, snapshot: Snapshot | None = None) -> AsyncGenerator[FakeSandbox]:
        tasks = self.machine.tasks or self._tasks
        assert tasks is not None, "the provider has not been entered"
        self.check_available()
        if spec.name in self.machine.sandboxes:
            raise BadRequestError(f"there is already a sandbox named {spec.name}")
        faults = self._faults(spec) if callable(self._faults) else self._faults
        await anyio.sleep(faults.open_seconds)
        if faults.open_error is not None:
            raise faults.open_error
        tree, servers = (None, None) if snapshot is None else self._saved(snapshot)
        container = FakeContainer(self._owner, spec, faults, tree)
        if spec.command != BOOT_COMMAND:
            first_process = FakeProbe(container.process_stream, container.tree)
        else:
            first_process = FakeDriver(
                container.process_stream,
                container.tree,
                tools=self._tools,
                run=self._run,
                faults=faults,
                on_start=self.starts.append,
                servers=servers,
            )
        async with AsyncExitStack() as stack:
            # The first attachment does not wait, so no cancellation can come before `_enter`.
            sandbox = FakeSandbox(self, container, await container.process_stream.attach())
            tasks.start_soon(container.run, first_process)
            self._enter(stack, sandbox)
            yield sandbox

    def _saved(self, snapshot: Snapshot) -> tuple[Tree, dict[str, bool]]:
        try:
            return self.machine.saved[int((snapshot.folder / SAVED_FILE).read_text())]
        except (OSError, ValueError):
            raise SnapshotError("the snapshot is gone or damaged") from None

    @asynccontextmanager
    async def reattach(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[FakeSandbox]:
        self.check_available()
        former = self.machine.sandboxes.get(spec.name)
        if former in self.opened:
            raise BadRequestError(f"there is already a sandbox named {spec.name}")
        if former is None or former.container.owner != owner:
            raise SandboxLostError(f"nothing is left of the sandbox {spec.name}")
        container = former.container
        async with AsyncExitStack() as stack:
            sandbox = FakeSandbox(self, container, EndedStream())
            self._enter(stack, sandbox)
            await anyio.sleep(container.faults.open_seconds)
            if not container.paused:
                await sandbox.reopen()
            yield sandbox

    def _enter(self, stack: AsyncExitStack, sandbox: FakeSandbox) -> None:
        self.machine.sandboxes[sandbox.spec.name] = sandbox
        self.opened.append(sandbox)

        async def exit_() -> None:
            await sandbox.stream.aclose()
            # After `die`, nothing changes on the machine any more.
            if not self._dead:
                await sandbox.end()
                await sandbox.container.process_stream.aclose()
                self.machine.sandboxes.pop(sandbox.spec.name, None)

        stack.push_async_callback(exit_)

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        self.check_available()
        orphans = [
            sandbox
            for sandbox in self.machine.sandboxes.values()
            if sandbox.container.owner == owner
            and sandbox not in self.opened
            and sandbox.spec.name not in keep
        ]
        for sandbox in orphans:
            await sandbox.end()
            await sandbox.container.process_stream.aclose()
            self.machine.sandboxes.pop(sandbox.spec.name, None)
        return len(orphans)

    def die(self) -> None:
        """Be the provider of a server that is killed (SIGKILL): its streams break and no exit handler acts.

        Sandboxes that survive stay on the machine, which must have been entered. Cancel what the server ran
        after this call.
        """
        assert self.machine.tasks is not None, "the machine has not been entered"
        self._dead = True
        for sandbox in self.opened:
            if self.machine.sandboxes.get(sandbox.spec.name) is sandbox:
                sandbox.break_stream()
                if not sandbox.spec.survives:
                    self.machine.tasks.start_soon(self._remove_at_end, sandbox)

    async def _remove_at_end(self, sandbox: FakeSandbox) -> None:
        await sandbox.container.finished.wait()
        self.machine.sandboxes.pop(sandbox.spec.name, None)

    def check_available(self) -> None:
        """Raises ProviderUnavailableError."""
        if self.unavailable or self._dead:
            raise ProviderUnavailableError("no engine answers")

    async def check(self, image: str | None) -> list[Finding]:
        return [finding("fake", True, f"always ready{f' with {image}' if image else ''}")]


class SavingFakeProvider(FakeProvider):
    """A fake provider whose sandboxes can be saved. `saved_bytes`: size of a snapshot."""

    snapshots = True

    @asynccontextmanager
    async def open(
        self, spec: SandboxSpec, *, snapshot: Snapshot | None = None
    ) -> AsyncGenerator[FakeSandbox]:
        async with self._open(spec, snapshot) as sandbox:
            yield sandbox
