"""Sandboxes that are plain processes of this machine: for the starter suite, tests and trusted tasks.

Nothing is isolated: what runs inside can read and write whatever this user can, and reach the network.
Linux only (/proc). Decided 2026-11-21: the limits of a spec are not enforced here, since no limit that a
plain process can be given (RLIMIT_AS, RLIMIT_NPROC) means what a container's does.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.abc import TaskGroup

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.sandboxes.base import Finding, Isolation, SandboxSpec, finding
from decathlon_mcp.sandboxes.local.processes import ProcessTree, marked
from decathlon_mcp.sandboxes.local.sandbox import FirstProcess, LocalSandbox
from decathlon_mcp.sandboxes.socket_stream import SocketStream
from decathlon_mcp.telemetry.logs import fields

REMOVE_SECONDS = 20.0
FREE_BYTES = 1 << 30
OWNER_FILE = "owner"
_NAME = re.compile(r"[a-z0-9-]{1,63}")

_log = logging.getLogger(__name__)


class LocalProvider:
    """Opens sandboxes as `<folder>/<name>/root` and a process; `owner` is part of their processes' marker.

    `at_once` bounds how many are removed at the same time.
    """

    name = "local"
    isolation: Isolation = "none"

    def __init__(self, owner: str, folder: Path, *, at_once: int = 4) -> None:
        self._owner = owner
        self._folder = folder.absolute()
        self._removing = CapacityLimiter(at_once)
        self._names: set[str] = set()
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
        # Told of no error: a task group would wrap what is not its own.
        await self._tasks.__aexit__(None, None, None)

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return PurePosixPath(self._home(spec.name) / "root")

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return True

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[LocalSandbox]:
        assert self._tasks is not None, "the provider has not been entered"
        home = self._home(spec.name)
        self._claim(home)
        async with AsyncExitStack() as stack:
            # From here to the first process no other task runs: there is nothing to be cancelled between.
            left = LocalResources(self._owner, spec.name, home)
            stack.push_async_callback(self._remove, left)
            left.furnish()
            left.process = FirstProcess(spec, home, f"{self._owner}/{spec.name}")
            line = await stack.enter_async_context(SocketStream(left.process.socket))
            await stack.enter_async_context(self._watched(left.process, line))
            sandbox = LocalSandbox(spec, home / "root", left.process, line, left.tree)
            stack.callback(sandbox.close)
            yield sandbox

    @asynccontextmanager
    async def _watched(self, process: FirstProcess, line: SocketStream) -> AsyncGenerator[None]:
        scope, finished = CancelScope(), anyio.Event()

        async def watch() -> None:
            try:
                with scope:
                    async with anyio.create_task_group() as both:
                        both.start_soon(process.follow_log)
                        await process.watch()
                        # A descendant may still hold the other end.
                        line.shut_down()
            finally:
                finished.set()

        assert self._tasks is not None
        self._tasks.start_soon(watch)
        try:
            yield
        finally:
            scope.cancel()
            with CancelScope(shield=True):
                await finished.wait()

    async def _remove(self, left: LocalResources) -> bool:
        with anyio.move_on_after(REMOVE_SECONDS, shield=True):
            if await to_thread.run_sync(left.remove, limiter=self._removing, abandon_on_cancel=True):
                self._names.discard(left.name)
                return True
        _log.error(
            "A local sandbox could not be removed", extra=fields(sandbox=left.name, folder=str(left.home))
        )
        return False

    async def sweep(self, owner: str) -> int:
        names = await to_thread.run_sync(self._left_by, owner)
        removed = [
            await self._remove(LocalResources(owner, name, self._home(name))) for name in sorted(names)
        ]
        return sum(removed)

    def _left_by(self, owner: str) -> set[str]:
        folders = {
            file.parent.name
            for file in self._folder.glob(f"*/{OWNER_FILE}")
            if file.read_text("utf-8", "replace") == owner
        }
        return (folders | marked(owner)) - self._names

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
                "tells which processes are a sandbox's",
                "the local provider needs Linux with /proc mounted; --provider docker does not",
            ),
            finding(
                "python3",
                python is not None,
                f"{python or 'none'} (Python {platform.python_version()})",
                f"there is no python3 beside {sys.executable}: run the server in a virtual environment",
            ),
            finding(
                "folder",
                os.access(existing, os.W_OK) and free >= FREE_BYTES,
                f"{self._folder}, {free >> 20} MiB free",
                "name one with --state that can be written to and has 1 GiB free",
            ),
        ]

    def _home(self, name: str) -> Path:
        return self._folder / name

    def _claim(self, home: Path) -> None:
        if not _NAME.fullmatch(home.name):
            raise BadRequestError(f"a sandbox's name is of a-z, 0-9 and -, at most 63 of them: {home.name!r}")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            home.mkdir()
        except FileExistsError:
            raise BadRequestError(f"there is a sandbox named {home.name} already") from None
        self._names.add(home.name)


class LocalResources:
    """All there may be of one local sandbox: processes and a folder."""

    def __init__(self, owner: str, name: str, home: Path) -> None:
        self.owner = owner
        self.name = name
        self.home = home
        self.process: FirstProcess | None = None

    @property
    def tree(self) -> ProcessTree:
        return ProcessTree(self.owner, self.name, self.process and self.process.number)

    def furnish(self) -> None:
        (self.home / OWNER_FILE).write_text(self.owner, "utf-8")
        (self.home / "root").mkdir()
        (self.home / "tmp").mkdir()

    def remove(self) -> bool:
        """Is all of it gone?"""
        killed = self.tree.kill()
        if self.process is not None:
            self.process.reap()
        shutil.rmtree(self.home, onerror=_permit)
        return killed and not self.home.exists()


def _permit(function: Callable[..., Any], path: str, error: object) -> None:
    """A folder that forbids its own removal is allowed it, once."""
    with suppress(OSError):
        for folder in (Path(path).parent, Path(path)):
            if not folder.is_symlink():
                folder.chmod(0o700)
        function(path)
