"""Opens sandboxes that are ordinary processes of this machine, for the starter suite and trusted tasks.

Nothing is isolated: what runs inside can read and write whatever this user can, and reach the network.
Requires Linux (/proc).

Decided 2026-11-21: the limits of a spec are not enforced. The limits that an ordinary process can have
(RLIMIT_AS, RLIMIT_NPROC) do not mean what a container's limits mean.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import anyio
from anyio import CancelScope, CapacityLimiter, Semaphore, to_thread
from anyio.abc import TaskGroup

from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.base import Finding, Isolation, SandboxSpec, finding
from decathlon_mcp.sandboxes.local.environment import LocalEnvironment
from decathlon_mcp.sandboxes.local.first_process import FirstProcess
from decathlon_mcp.sandboxes.local.process_signals import ProcessSignaller
from decathlon_mcp.sandboxes.local.process_table import is_stopped, sandboxes_with_processes
from decathlon_mcp.sandboxes.local.sandbox import (
    OWNER_FILE,
    LocalResources,
    LocalSandbox,
    read_owner,
    unfinished_folder_prefix,
)
from decathlon_mcp.telemetry.logs import fields

DELETE_SECONDS = 20.0
"""How long deleting one sandbox's folder may take; it does not count while it waits for others."""
FREE_BYTES = 1 << 30
_NAME = re.compile(r"[a-z0-9-]{1,63}")

_log = logging.getLogger(__name__)


class LocalProvider:
    """Opens sandboxes as folders `<folder>/<name>/root`, each with a first process.

    `at_once` bounds how many folders are deleted at the same time.
    """

    name = "local"
    isolation: Isolation = "none"

    def __init__(self, owner: str, folder: Path, *, at_once: int = 4) -> None:
        self._owner = owner
        self._folder = folder.absolute()
        self._deletions = Semaphore(at_once)
        # Never waited for: the clock of a deletion, which has its place by then, would already run.
        self._threads = CapacityLimiter(math.inf)
        self._signaller = ProcessSignaller()
        self._environment = LocalEnvironment()
        self._open_names: set[str] = set()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        _log.warning(
            "The local provider isolates nothing: what runs in a sandbox can do whatever this user can",
            extra=fields(folder=str(self._folder)),
        )
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        # Not given the error: the task group would wrap it in an exception group.
        await self._tasks.__aexit__(None, None, None)

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return PurePosixPath(self._folder / spec.name / "root")

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return True

    async def environment(self, image: str | None) -> str | None:
        return await self._environment.identity()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[LocalSandbox]:
        self._check_name(spec.name)
        resources = LocalResources(self._owner, spec.name, self._folder / spec.name)
        # Before there is a folder, which a sweep in a thread could take for an orphan's.
        self._open_names.add(spec.name)
        try:
            resources.create_folders()
        except BaseException:
            self._open_names.discard(spec.name)
            raise
        # There is no await before the first process has started, so no cancellation can come between.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._remove, resources)
            resources.start(spec)
            yield await self._running(stack, spec, resources)

    @asynccontextmanager
    async def take_back(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[LocalSandbox]:
        self._check_name(spec.name)
        resources = LocalResources(owner, spec.name, self._folder / spec.name)
        # Not removed: it is another server's.
        if resources.folder.exists() and read_owner(resources.folder) != owner:
            raise SandboxLostError(f"there is no sandbox named {spec.name} of this owner")
        self._open_names.add(spec.name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._remove, resources)
            leader = resources.take_back()
            yield await self._running(stack, spec, resources, paused=is_stopped(leader))

    async def _running(
        self, stack: AsyncExitStack, spec: SandboxSpec, resources: LocalResources, *, paused: bool = False
    ) -> LocalSandbox:
        """The sandbox of a process that has been started or taken back; `stack` then ends it."""
        process = resources.process
        assert process is not None
        stack.push_async_callback(process.close_stream)
        if paused:
            # The server may have died before all processes were stopped.
            await self._signaller.stop(resources.process_tree)
        await stack.enter_async_context(self._watching(process))
        sandbox = LocalSandbox(spec, resources, self._signaller, paused=paused)
        # Before the stream is closed: at the end of its input each driver would search /proc for its
        # processes, and several hundred that end together would keep the machine busy with that.
        stack.push_async_callback(self._kill, resources)
        stack.callback(sandbox.mark_closed)
        return sandbox

    @asynccontextmanager
    async def _watching(self, process: FirstProcess) -> AsyncGenerator[None]:
        """Read the first process's log, and end its stream when it has ended."""
        assert self._tasks is not None, "the provider has not been entered"
        scope, finished = CancelScope(), anyio.Event()

        async def watch() -> None:
            try:
                with scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(process.follow_log)
                        await process.wait()
            finally:
                finished.set()

        self._tasks.start_soon(watch)
        try:
            yield
        finally:
            scope.cancel()
            with CancelScope(shield=True):
                await finished.wait()

    async def _remove(self, resources: LocalResources) -> bool:
        """Kill the sandbox's processes and delete its folder; whether both are gone. Never raises."""
        killed = await self._kill(resources)
        deleted = await self._delete(resources)
        # Also if it failed: then the next sweep tries again.
        self._open_names.discard(resources.name)
        if killed and deleted:
            return True
        _log.error(
            "A local sandbox could not be removed",
            extra=fields(sandbox=resources.name, folder=str(resources.folder), killed=killed),
        )
        return False

    async def _kill(self, resources: LocalResources) -> bool:
        killed = resources.killed
        if killed is None:
            with CancelScope(shield=True):
                killed = await self._signaller.kill(resources.process_tree)
        resources.killed = bool(killed)
        return resources.killed

    async def _delete(self, resources: LocalResources) -> bool:
        with CancelScope(shield=True):
            async with self._deletions:
                with anyio.move_on_after(DELETE_SECONDS):
                    return await to_thread.run_sync(
                        resources.delete, limiter=self._threads, abandon_on_cancel=True
                    )
        return False

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        removed: list[str] = []

        async def remove(name: str) -> None:
            if await self._remove(LocalResources(owner, name, self._folder / name)):
                removed.append(name)

        async with anyio.create_task_group() as tasks:
            for name in await to_thread.run_sync(self._orphans_of, owner, set(keep)):
                tasks.start_soon(remove, name)
        return len(removed)

    def _orphans_of(self, owner: str, keep: set[str]) -> set[str]:
        """Names of this owner's sandboxes that this provider did not open, except `keep`."""
        names = {file.parent.name for file in self._folder.glob(f"*/{OWNER_FILE}")}
        prefix = unfinished_folder_prefix(owner)
        folders = {name for name in names if read_owner(self._folder / name) == owner}
        unfinished = {path.name for path in self._folder.glob(".*") if path.name.startswith(prefix)}
        orphans = folders | unfinished | sandboxes_with_processes(owner)
        spared = self._open_names | keep
        return {name for name in orphans if name.removeprefix(prefix) not in spared}

    async def check(self, image: str | None) -> list[Finding]:
        return await to_thread.run_sync(self._check)

    def _check(self) -> list[Finding]:
        python = shutil.which("python3", path=str(Path(sys.executable).parent))
        existing = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        return [
            finding("isolation", True, "none: sandboxes are processes of this user"),
            finding(
                "/proc",
                Path("/proc/self/environ").exists(),
                "shows which processes belong to a sandbox",
                "the local provider requires Linux with /proc mounted; --provider docker does not",
            ),
            finding(
                "python3",
                python is not None,
                f"{python or 'none'} (Python {platform.python_version()})",
                f"there is no python3 next to {sys.executable}: run the server in a virtual environment",
            ),
            finding(
                "folder",
                os.access(existing, os.W_OK) and free >= FREE_BYTES,
                f"{self._folder}, {free >> 20} MiB free",
                "choose a writable folder with 1 GiB free (--state)",
            ),
        ]

    def _check_name(self, name: str) -> None:
        """Raises BadRequestError if a sandbox of this name cannot be opened."""
        if name in self._open_names:
            raise BadRequestError(f"there is already a sandbox named {name}")
        if not _NAME.fullmatch(name):
            raise BadRequestError(f"a sandbox's name consists of 1 to 63 of a-z, 0-9 and -, not {name!r}")
