"""The part of a provider that starts processes on this machine, takes them back and removes them.

Requires Linux (/proc).
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Generic, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, Semaphore, to_thread

from decathlon_mcp.background import finish, run_alone
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.base import BaseProvider, SandboxSpec, check_swept
from decathlon_mcp.sandboxes.processes.first_process import FirstProcess
from decathlon_mcp.sandboxes.processes.resources import (
    ProcessResources,
    read_owner,
    sandbox_owners,
    unfinished_folder_prefix,
)
from decathlon_mcp.sandboxes.processes.sandbox import ProcessSandbox
from decathlon_mcp.sandboxes.processes.signals import ProcessSignaller
from decathlon_mcp.sandboxes.processes.table import ProcessId, is_stopped
from decathlon_mcp.telemetry.logs import fields

DELETIONS = 4
"""How many folders are deleted at the same time."""
DELETE_SECONDS = 20.0
"""How long deleting one sandbox's folder may take; it does not count while it waits for others."""
_NAME = re.compile(r"[a-z0-9-]{1,63}")

_log = logging.getLogger(__name__)

Resources = TypeVar("Resources", bound=ProcessResources)
Opened = TypeVar("Opened", bound=ProcessSandbox)


class ProcessProvider(BaseProvider, ABC, Generic[Resources, Opened]):
    """Opens sandboxes whose first process is a child of the server, each with a folder in `folder`."""

    def __init__(self, owner: str, folder: Path) -> None:
        super().__init__(owner)
        self._folder = folder.absolute()
        self._deletions = Semaphore(DELETIONS)
        # Never waited for: the clock of a deletion, which has its place by then, would already run.
        self._threads = CapacityLimiter(math.inf)
        self._signaller = ProcessSignaller()

    @abstractmethod
    def _resources(self, owner: str, name: str) -> Resources:
        """The resources of a sandbox that is to be opened, taken back or removed."""

    @abstractmethod
    def _start(self, spec: SandboxSpec, resources: Resources) -> None:
        """Start the first process, for which `resources` then has a value. Must not block for long.

        Raises ImageError, BadRequestError, ProviderUnavailableError.
        """

    @abstractmethod
    async def _opened(
        self, spec: SandboxSpec, resources: Resources, *, paused: bool, taken_back: bool
    ) -> Opened:
        """The sandbox of a process that has been started or taken back.

        Raises SandboxLostError, ImageError, ProviderUnavailableError.
        """

    def _is_paused(self, resources: Resources, leader: ProcessId) -> bool:
        """Whether a sandbox that another server has opened, with this first process, was paused."""
        return is_stopped(leader)

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Opened]:
        return self._open(spec, self._resources(self._owner, spec.name))

    @asynccontextmanager
    async def _open(self, spec: SandboxSpec, resources: Resources) -> AsyncGenerator[Opened]:
        self._check_name(spec.name)
        # Before there is a folder, which a sweep in a thread could take for an orphan's.
        self._open_names.add(spec.name)
        try:
            resources.create_folders()
        except BaseException:
            self._open_names.discard(spec.name)
            raise
        # There is no await before the first process has started, so no cancellation can come between.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._finish_removal, resources)
            self._start(spec, resources)
            yield await self._running(stack, spec, resources)

    @asynccontextmanager
    async def take_back(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[Opened]:
        self._check_name(spec.name)
        resources = self._resources(owner, spec.name)
        # Not removed: it is another server's.
        if resources.folder.exists() and read_owner(resources.folder) != owner:
            raise SandboxLostError(f"there is no sandbox named {spec.name} of this owner")
        self._open_names.add(spec.name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._finish_removal, resources)
            leader = resources.take_back()
            paused = self._is_paused(resources, leader)
            yield await self._running(stack, spec, resources, paused=paused, taken_back=True)

    async def _running(
        self,
        stack: AsyncExitStack,
        spec: SandboxSpec,
        resources: Resources,
        *,
        paused: bool = False,
        taken_back: bool = False,
    ) -> Opened:
        """The sandbox of a process that has been started or taken back; `stack` then ends it."""
        process = resources.process
        assert process is not None
        # Each step alone: a failure must replace neither the body's error nor its result.
        stack.push_async_callback(run_alone, process.close_stream)
        await stack.enter_async_context(self._watching(process))
        # Before the stream is closed: at the end of its input each driver would search /proc for its
        # processes, and several hundred that end together would keep the machine busy with that.
        stack.push_async_callback(run_alone, self._kill, resources)
        sandbox = await self._opened(spec, resources, paused=paused, taken_back=taken_back)
        stack.callback(sandbox.mark_closed)
        if paused:
            # The server may have died before all processes were stopped.
            await sandbox.pause()
        return sandbox

    @asynccontextmanager
    async def _watching(self, process: FirstProcess) -> AsyncGenerator[None]:
        """Read the first process's log, and end its stream when it has ended."""
        scope, finished = CancelScope(), anyio.Event()

        async def watch() -> None:
            try:
                with scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(process.follow_log)
                        await process.wait()
            finally:
                finished.set()

        self._tasks.start_soon(run_alone, watch)
        try:
            yield
        finally:
            scope.cancel()
            with CancelScope(shield=True):
                await finished.wait()

    async def _finish_removal(self, resources: Resources) -> None:
        """Remove a sandbox, even if the caller is cancelled."""
        await finish(self._tasks, lambda: self._remove(resources))

    async def _remove(self, resources: Resources) -> bool:
        """Kill the sandbox's processes and delete its folder; whether both are gone.

        If the processes are not, the folder's content is deleted all the same, except what the next sweep
        needs to find them. Raises what either raises, e.g. OSError.
        """
        killed = deleted = False
        try:
            try:
                killed = await self._kill(resources)
            finally:
                deleted = await self._delete(resources)
            return killed and deleted
        finally:
            # Also if it failed: then the next sweep tries again.
            self._open_names.discard(resources.name)
            if not (killed and deleted):
                _log.error(
                    "A sandbox could not be removed",
                    extra=fields(sandbox=resources.name, folder=str(resources.folder), killed=killed),
                )

    async def _kill(self, resources: Resources) -> bool:
        killed = resources.killed
        if killed is None:
            with CancelScope(shield=True):
                killed = await self._kill_processes(resources)
        resources.killed = bool(killed)
        return resources.killed

    async def _kill_processes(self, resources: Resources) -> bool:
        return await self._signaller.kill(resources.root_process)

    async def _delete(self, resources: Resources) -> bool:
        with CancelScope(shield=True):
            async with self._deletions:
                with anyio.move_on_after(DELETE_SECONDS):
                    return await to_thread.run_sync(
                        resources.delete, limiter=self._threads, abandon_on_cancel=True
                    )
        return False

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        orphans = await to_thread.run_sync(self._orphans_of, owner, set(keep))
        removed: set[str] = set()

        async def remove(name: str) -> None:
            if await self._remove(self._resources(owner, name)):
                removed.add(name)

        async with anyio.create_task_group() as tasks:
            for name in orphans:
                tasks.start_soon(run_alone, remove, name)
        check_swept(orphans - removed)
        return len(removed)

    def _orphans_of(self, owner: str, keep: set[str]) -> set[str]:
        """Names of this owner's sandboxes that this provider did not open, except `keep`."""
        prefix = unfinished_folder_prefix(owner)
        orphans = {
            name
            for name, of in sandbox_owners(self._folder).items()
            if of == owner and _NAME.fullmatch(name.removeprefix(prefix))
        }
        spared = self._open_names | keep
        return {name for name in orphans if name.removeprefix(prefix) not in spared}

    def _check_name(self, name: str) -> None:
        super()._check_name(name)
        if not _NAME.fullmatch(name):
            raise BadRequestError(f"a sandbox's name consists of 1 to 63 of a-z, 0-9 and -, not {name!r}")
