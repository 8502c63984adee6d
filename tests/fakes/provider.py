"""A provider whose sandboxes run in this process, for tests of the layers above providers.

    FakeProvider(tools={"files": {"echo": echo}})     # async def echo(call: FakeCall) -> str | Json
    FakeProvider(run=lambda request: 0 if "preprocess" in request.argv else 1)
    FakeProvider(faults=Faults(silent_on="call"))
    FakeProvider(faults=lambda spec: Faults(open_seconds=1.0 if spec.image else 0.0))

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
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import anyio
from anyio import AsyncContextManagerMixin, CancelScope
from anyio.abc import ByteStream, TaskGroup

from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.background import background_tasks
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
from tests.fakes.driver import FakeDriver, FakeProbe, Faults, ProcessExit, Run, Tools
from tests.fakes.tree import Tree

_CAUSE_SECONDS = 2.0
SAVED_FILE = "saved"


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


class FakeSandbox:
    """Implements `base.Sandbox`, for the server that opened it and for those that take it back.

    Tests can read and write its file system, `tree`.
    """

    log_tail = ""

    def __init__(self, provider: FakeProvider, spec: SandboxSpec, faults: Faults, saved: Tree | None) -> None:
        self.owner = provider.owner
        self.provider = provider
        self.spec = spec
        self.root = spec.root
        self.image_digest = _digest(spec.image)
        self.faults = faults
        self.tree = Tree(provider.machine.folder, saved)
        self.tree.make(spec.root)
        self.stream: ByteStream = EndedStream()
        self.process_stream = ProcessStream(survives=spec.survives)
        self.first_process: FakeDriver | FakeProbe | None = None
        self.exit: ProcessExit | None = None
        self.paused = False
        self.closed = False
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

    async def stop(self) -> None:
        """Stop the first process, for good."""
        self._process.cancel()
        with CancelScope(shield=True):
            await self.finished.wait()

    @property
    def merges(self) -> bool:
        """Whether its memory is merged with that of others."""
        return isinstance(self.first_process, FakeDriver) and self.first_process.merges

    @property
    def max_snapshot_bytes(self) -> int:
        return self.provider.saved_bytes

    async def snapshot(self, folder: Path) -> Snapshot:
        """See `SavedSandbox`, for a first process that is a driver. The machine has what is saved."""
        await self._begin(self.root, self.faults.snapshot_error)
        assert isinstance(self.first_process, FakeDriver)
        machine = self.provider.machine
        await anyio.Path(folder).mkdir(mode=0o700)
        padding = b" " * self.provider.saved_bytes
        await anyio.Path(folder / SAVED_FILE).write_bytes(f"{len(machine.saved):<10}".encode() + padding[10:])
        machine.saved.append((Tree(machine.folder, self.tree), dict(self.first_process.servers)))
        return Snapshot(folder)

    async def reopen(self) -> None:
        await self._begin(self.root)
        self.provider.check_available()
        await self.stream.aclose()
        if self.paused or self.finished.is_set():
            raise SandboxLostError("the sandbox's first process has ended or is paused")
        self.stream = await self.process_stream.attach()

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        await self._begin(folder, self.faults.put_error)
        self.tree.put(folder, archive)

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        await self._begin(folder, self.faults.get_error)
        self.tree.get(folder, archive, limit_bytes)

    async def pause(self) -> None:
        await self._begin(self.root)
        if self.exit is not None:
            raise SandboxLostError("the sandbox's first process has ended")
        await self._begin(self.root, self.faults.pause_error)
        self.paused = True
        await self.stop()

    async def cause_of_end(self) -> str | None:
        ended = isinstance(self.stream, SocketStream) and self.stream.ended.is_set()
        if ended and not self.paused:
            with anyio.move_on_after(_CAUSE_SECONDS):
                await self.finished.wait()
        if self.exit is None:
            return None
        return "out of memory" if self.exit.out_of_memory else f"exit code {self.exit.exit_code}"

    async def is_running(self) -> bool:
        return self.exit is None and not self.paused

    async def usage(self, sandboxes: int) -> Usage:
        return self.faults.usage

    async def remove(self) -> None:
        """Kill the first process, paused or not, and remove what the machine has."""
        self.closed = True
        with CancelScope(shield=True):
            await self.stop()
            await self.process_stream.aclose()
        self.provider.machine.sandboxes.pop(self.spec.name, None)

    async def lose(self, exit_code: int = 137, *, out_of_memory: bool = False) -> None:
        """Kill the first process from outside: for its server, the sandbox is lost."""
        self.exit = self.exit or ProcessExit(exit_code, out_of_memory=out_of_memory)
        await self.stop()

    def break_stream(self) -> None:
        """Break the stream; what is on its way in either direction is lost."""
        self.process_stream.drop()

    async def _begin(self, folder: PurePosixPath, fault: Exception | None = None) -> None:
        """Begin an operation on a folder."""
        if self.closed:
            raise SandboxLostError("the sandbox has been closed")
        check_folder(folder)
        await anyio.lowlevel.checkpoint()
        if fault is not None:
            raise fault


class FakeMachine(AsyncContextManagerMixin):
    """A machine that several providers can share, with the sandboxes of all of them.

    Entered (`async with`), it runs their first processes, which then outlive the providers, and has their
    files. Otherwise they go with the provider.
    """

    folder: str

    def __init__(self) -> None:
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.saved: list[tuple[Tree, dict[str, bool]]] = []
        """The files and the servers of sandboxes that were saved."""
        self.tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        with TemporaryDirectory(prefix="fake-machine-") as self.folder:
            async with background_tasks() as self.tasks:
                yield self


class FakeProvider:
    """Opens sandboxes in this process.

    `run` returns the result of a process; by default exit code 0. `opened` has all sandboxes that this
    provider opened or took back, `machine.sandboxes` those that are still there. `starts`: the names of the
    servers that were started, or tried to, in order. While `unavailable` is set, there is no engine.
    """

    name = "fake"
    snapshots = False
    unlimited: tuple[LimitName, ...] = ()

    def __init__(
        self,
        owner: str = "fake",
        *,
        tools: Tools | None = None,
        run: Run = lambda request: 0,
        faults: Faults | Callable[[SandboxSpec], Faults] | None = None,
        machine: FakeMachine | None = None,
        isolation: Isolation = "container",
    ) -> None:
        self.saved_bytes = 10
        self.isolation: Isolation = isolation
        self.machine = machine or FakeMachine()
        self.opened: list[FakeSandbox] = []
        self.starts: list[str] = []
        self.unavailable = False
        self.owner = owner
        self._dead = False
        self._tools: Tools = tools or {}
        self._run = run
        self._faults = faults or Faults()
        self._running = AsyncExitStack()
        self._tasks: TaskGroup

    async def __aenter__(self) -> Self:
        if self.machine.tasks is None:
            self.machine.folder = self._running.enter_context(TemporaryDirectory(prefix="fake-machine-"))
        self._tasks = await self._running.enter_async_context(background_tasks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.aclose()

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
    async def open(
        self, spec: SandboxSpec, *, snapshot: Snapshot | None = None
    ) -> AsyncGenerator[FakeSandbox]:
        self.check_available()
        if spec.name in self.machine.sandboxes:
            raise BadRequestError(f"there is already a sandbox named {spec.name}")
        faults = self._faults(spec) if callable(self._faults) else self._faults
        await anyio.sleep(faults.open_seconds)
        if faults.open_error is not None:
            raise faults.open_error
        tree, servers = (None, None) if snapshot is None else self._saved(snapshot)
        sandbox = FakeSandbox(self, spec, faults, tree)
        if spec.command != BOOT_COMMAND:
            first_process = FakeProbe(sandbox.process_stream, sandbox.tree)
        else:
            first_process = FakeDriver(
                sandbox.process_stream,
                sandbox.tree,
                tools=self._tools,
                run=self._run,
                faults=faults,
                on_start=self.starts.append,
                servers=servers,
            )
        # This does not wait, so no cancellation can come before `_entered`.
        sandbox.stream = await sandbox.process_stream.attach()
        (self.machine.tasks or self._tasks).start_soon(sandbox.run, first_process)
        async with self._entered(sandbox):
            yield sandbox

    def _saved(self, snapshot: Snapshot) -> tuple[Tree, dict[str, bool]]:
        try:
            return self.machine.saved[int((snapshot.folder / SAVED_FILE).read_text())]
        except (OSError, ValueError):
            raise SnapshotError("the snapshot is gone or damaged") from None

    @asynccontextmanager
    async def reattach(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[FakeSandbox]:
        self.check_available()
        sandbox = self.machine.sandboxes.get(spec.name)
        if sandbox in self.opened:
            raise BadRequestError(f"there is already a sandbox named {spec.name}")
        if sandbox is None or sandbox.owner != owner:
            raise SandboxLostError(f"nothing is left of the sandbox {spec.name}")
        await sandbox.stream.aclose()
        sandbox.provider, sandbox.stream = self, EndedStream()
        async with self._entered(sandbox):
            await anyio.sleep(sandbox.faults.open_seconds)
            if not sandbox.paused:
                await sandbox.reopen()
            yield sandbox

    @asynccontextmanager
    async def _entered(self, sandbox: FakeSandbox) -> AsyncGenerator[None]:
        self.machine.sandboxes[sandbox.spec.name] = sandbox
        self.opened.append(sandbox)
        try:
            yield
        finally:
            if sandbox.provider is self:
                await sandbox.stream.aclose()
            # After `die`, nothing changes on the machine any more.
            if not self._dead:
                await sandbox.remove()

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        self.check_available()
        orphans = [
            sandbox
            for name, sandbox in self.machine.sandboxes.items()
            if sandbox.owner == owner and sandbox not in self.opened and name not in keep
        ]
        for sandbox in orphans:
            await sandbox.remove()
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
        await sandbox.finished.wait()
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
