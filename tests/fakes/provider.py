"""A provider whose sandboxes live in this process, for tests of what is above providers."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from decathlon_mcp.archives.packing import save
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.base import Finding, Isolation, SandboxSpec, finding
from decathlon_mcp.sandboxes.socket_stream import SocketStream
from tests.fakes.driver import FakeDriver, FakeRun, Run, Tools
from tests.fakes.faults import Died, Faults
from tests.fakes.tree import Tree

_CAUSE_SECONDS = 2.0


def _succeed(asked: FakeRun) -> int:
    return 0


class FakeSandbox:
    """See `base.Sandbox`. `tree` is its file system, for tests to look into and to write to."""

    def __init__(self, owner: str, spec: SandboxSpec, faults: Faults, line: SocketStream) -> None:
        self.owner = owner
        self.spec = spec
        self.faults = faults
        self.stream = line
        self.tree = Tree()
        self.tree.make(spec.root)
        self.log_tail = ""
        self.death: Died | None = None
        self.paused = False
        self.removals = 0
        """How often its removal was tried."""
        self._process = CancelScope()
        self._finished = anyio.Event()
        self._gone = False

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    @property
    def out_of_memory(self) -> bool:
        return self.death is not None and self.death.out_of_memory

    @property
    def image_digest(self) -> str | None:
        return f"sha256:{self.spec.image}" if self.spec.image else None

    async def put(self, folder: PurePosixPath, archive: Path | bytes) -> None:
        self._check(folder)
        await anyio.lowlevel.checkpoint()
        self.tree.put(folder, archive)

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        self._check(folder)
        await anyio.lowlevel.checkpoint()
        save(self.tree.get(folder), archive, limit_bytes)

    async def pause(self) -> None:
        self._check(self.root)
        if self.death is not None:
            raise SandboxLostError("the sandbox's first process has ended")
        self.paused = True
        self._process.cancel()
        await self._finished.wait()

    async def cause_of_end(self) -> str | None:
        if self.stream.ended.is_set() and not self.paused:
            with anyio.move_on_after(_CAUSE_SECONDS):
                await self._finished.wait()
        if self.death is None:
            return None
        return "out of memory" if self.death.out_of_memory else f"exit code {self.death.exit_code}"

    async def run(self, driver: FakeDriver, theirs: SocketStream) -> None:
        """The first process: closes its end of the line when it ends, not when it is paused."""
        try:
            with self._process:
                self.death = await driver.live()
        finally:
            if not self.paused:
                await theirs.aclose()
            self._finished.set()

    async def end(self) -> None:
        """Kill the first process, paused or not."""
        self._gone = True
        self._process.cancel()
        with CancelScope(shield=True):
            await self._finished.wait()

    def _check(self, folder: PurePosixPath) -> None:
        if self._gone:
            raise SandboxLostError("the sandbox has been closed")
        if not folder.is_absolute() or ".." in folder.parts or folder.is_relative_to("/tmp"):
            raise BadRequestError(f"not a folder that files can go to: {folder}")


class FakeMachine:
    """What sandboxes there are, whoever opened them: several providers may share one machine."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, FakeSandbox] = {}


class FakeProvider:
    """Opens sandboxes in this process.

    `tools`: server to tool to what it does. `run`: what becomes of a process; exit code 0 unless given.
    `faults`: what is wrong with each sandbox. `opened` are all that ever were, `machine.sandboxes` those that
    are open.
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
        self.isolation: Isolation = isolation
        self.machine = machine or FakeMachine()
        self.opened: list[FakeSandbox] = []
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

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return False

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[FakeSandbox]:
        assert self._tasks is not None, "the provider has not been entered"
        if spec.name in self.machine.sandboxes:
            raise BadRequestError(f"there is a sandbox named {spec.name} already")
        faults = self._faults(spec) if callable(self._faults) else self._faults
        await anyio.sleep(faults.open_seconds)
        if faults.open_error is not None:
            raise faults.open_error
        async with AsyncExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            stack.callback(ours.close)
            line, far = SocketStream(ours), SocketStream(theirs)
            sandbox = FakeSandbox(self._owner, spec, faults, line)
            driver = FakeDriver(far, sandbox.tree, tools=self._tools, run=self._run, faults=faults)
            self.machine.sandboxes[spec.name] = sandbox
            self.opened.append(sandbox)
            stack.push_async_callback(self._remove, sandbox)
            stack.push_async_callback(far.aclose)
            self._tasks.start_soon(sandbox.run, driver, far)
            stack.push_async_callback(sandbox.end)
            stack.push_async_callback(line.aclose)
            yield sandbox

    async def _remove(self, sandbox: FakeSandbox) -> None:
        with CancelScope(shield=True):
            while sandbox.removals < sandbox.faults.removals_refused:
                sandbox.removals += 1
                await anyio.sleep(0.001)
        self.machine.sandboxes.pop(sandbox.spec.name, None)

    async def sweep(self, owner: str) -> int:
        left = [
            each
            for each in self.machine.sandboxes.values()
            if each.owner == owner and each not in self.opened
        ]
        for sandbox in left:
            await sandbox.end()
            await self._remove(sandbox)
        return len(left)

    async def check(self, image: str | None) -> list[Finding]:
        return [finding("fake", True, f"always ready{f' with {image}' if image else ''}")]
