"""A provider whose sandboxes run in this process, for tests of the layers above providers.

    FakeProvider(tools={"files": {"echo": echo}})     # async def echo(call: FakeCall) -> str | Json
    FakeProvider(run=lambda request: 0 if "preprocess" in request.argv else 1)
    FakeProvider(faults=Faults(silent_on="call"))
    FakeProvider(faults=lambda spec: Faults(never_ready=spec.name.endswith("-grader")))

It passes the same conformance checks as the real providers (`tests/sandboxes`).
"""

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

from decathlon_mcp.archives.writing import save
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.base import Finding, Isolation, SandboxSpec, finding
from decathlon_mcp.sandboxes.conformance import PROBE_COMMAND
from decathlon_mcp.sandboxes.streams import SocketStream
from tests.fakes.driver import FakeDriver, FakeProbe, FakeRun, Faults, ProcessExit, Run, Tools
from tests.fakes.tree import Tree

_CAUSE_SECONDS = 2.0


def _succeed(request: FakeRun) -> int:
    return 0


class FakeSandbox:
    """Implements `base.Sandbox`. Tests can read and write its file system, `tree`."""

    def __init__(self, owner: str, spec: SandboxSpec, faults: Faults, stream: SocketStream) -> None:
        self.owner = owner
        self.spec = spec
        self.faults = faults
        self.stream = stream
        self.tree = Tree()
        self.tree.make(spec.root)
        self.log_tail = ""
        self.exit: ProcessExit | None = None
        self.paused = False
        self.failed_removals = 0
        """Number of attempts to remove it that failed."""
        self._process = CancelScope()
        self._finished = anyio.Event()
        self._closed = False

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

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
        if self.exit is not None:
            raise SandboxLostError("the sandbox's first process has ended")
        self.paused = True
        self._process.cancel()
        await self._finished.wait()

    async def cause_of_end(self) -> str | None:
        if self.stream.ended.is_set() and not self.paused:
            with anyio.move_on_after(_CAUSE_SECONDS):
                await self._finished.wait()
        if self.exit is None:
            return None
        return "out of memory" if self.exit.out_of_memory else f"exit code {self.exit.exit_code}"

    async def is_running(self) -> bool:
        return self.exit is None and not self.paused

    async def run(self, first_process: FakeDriver | FakeProbe, stream: SocketStream) -> None:
        """Run the first process. Close its end of the stream when it ends, but not when it is paused."""
        try:
            with self._process:
                self.exit = await first_process.run()
        finally:
            if not self.paused:
                await stream.aclose()
            self._finished.set()

    async def end(self) -> None:
        """Kill the first process, paused or not."""
        self._closed = True
        self._process.cancel()
        with CancelScope(shield=True):
            await self._finished.wait()

    def _check(self, folder: PurePosixPath) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")
        if not folder.is_absolute() or ".." in folder.parts or folder.is_relative_to("/tmp"):
            raise BadRequestError(f"not a folder that files can be copied to: {folder}")


class FakeMachine:
    """A machine that several providers can share, with the open sandboxes of all of them."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, FakeSandbox] = {}


class FakeProvider:
    """Opens sandboxes in this process.

    `run` returns the result of a process; by default exit code 0. `opened` has all sandboxes that this
    provider opened, `machine.sandboxes` those that are still open.
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
            raise BadRequestError(f"there is already a sandbox named {spec.name}")
        faults = self._faults(spec) if callable(self._faults) else self._faults
        await anyio.sleep(faults.open_seconds)
        if faults.open_error is not None:
            raise faults.open_error
        async with AsyncExitStack() as stack:
            server_socket, sandbox_socket = socket.socketpair()
            stack.callback(sandbox_socket.close)
            stack.callback(server_socket.close)
            server_end, sandbox_end = SocketStream(server_socket), SocketStream(sandbox_socket)
            sandbox = FakeSandbox(self._owner, spec, faults, server_end)
            if spec.command == PROBE_COMMAND:
                first_process = FakeProbe(sandbox_end, sandbox.tree)
            else:
                first_process = FakeDriver(
                    sandbox_end, sandbox.tree, tools=self._tools, run=self._run, faults=faults
                )
            self.machine.sandboxes[spec.name] = sandbox
            self.opened.append(sandbox)
            stack.push_async_callback(self._remove, sandbox)
            stack.push_async_callback(sandbox_end.aclose)
            self._tasks.start_soon(sandbox.run, first_process, sandbox_end)
            stack.push_async_callback(sandbox.end)
            stack.push_async_callback(server_end.aclose)
            yield sandbox

    async def _remove(self, sandbox: FakeSandbox) -> None:
        with CancelScope(shield=True):
            while sandbox.failed_removals < sandbox.faults.removals_refused:
                sandbox.failed_removals += 1
                await anyio.sleep(0.001)
        self.machine.sandboxes.pop(sandbox.spec.name, None)

    async def sweep(self, owner: str) -> int:
        orphans = [
            sandbox
            for sandbox in self.machine.sandboxes.values()
            if sandbox.owner == owner and sandbox not in self.opened
        ]
        for sandbox in orphans:
            await sandbox.end()
            await self._remove(sandbox)
        return len(orphans)

    async def check(self, image: str | None) -> list[Finding]:
        return [finding("fake", True, f"always ready{f' with {image}' if image else ''}")]
