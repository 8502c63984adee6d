"""Opens sandboxes that are processes of this machine, reattaches them and removes them. Requires Linux.

There are two axes. Files: this machine's own (`host_files`), or, if the spec names an image, an unpacked
image's (`image_folder`). Kernel: this machine's, or a plug-in's (`NamespaceSandbox.kernel`). Both are in
namespaces; or there is no isolation at all (`plain`), and then neither axis.

With this machine's files, every sandbox has the suite's root at the same path, so that a task's prompt is the
same in every episode. The network has a loopback interface and nothing else, unless the task needs more: then
it leads to other machines too, and to nothing else of this machine (`network`). Where that is not possible,
it is this machine's own.

Decided 2026-11-22: no outbound network with an image. In the host's network namespace a sandbox would reach
the services on the host's loopback interface, and a network of its own needs another /etc/resolv.conf than
the image's, which may be missing.
"""

from __future__ import annotations

import logging
import math
import platform
import re
import shutil
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

import anyio
from anyio import CancelScope, CapacityLimiter, Semaphore, to_thread

from decathlon_mcp.background import finish, run_alone
from decathlon_mcp.errors import BadRequestError, DecathlonError, ImageError, SandboxLostError
from decathlon_mcp.sandboxes.base import (
    PYTHON_CURE,
    BaseProvider,
    Finding,
    LimitName,
    SandboxSpec,
    check_python,
    finding,
    limited_check,
    remove_all,
)
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.sandboxes.host.command import ALLOW, INSTALL, Machine, lacks_namespaces, program_version
from decathlon_mcp.sandboxes.host.first_process import FirstProcess
from decathlon_mcp.sandboxes.host.host_files import ProgramsIdentity
from decathlon_mcp.sandboxes.host.image_folder import UNPACK
from decathlon_mcp.sandboxes.host.isolation import HOST, PLAIN, cure_of
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.network import PROGRAM
from decathlon_mcp.sandboxes.host.processes import ProcessSignaller
from decathlon_mcp.sandboxes.host.sandbox import Footprint, HostSandbox, PlainSandbox
from decathlon_mcp.sandboxes.host.sandbox_folder import read_owner, sandbox_owners, unfinished_folder_prefix
from decathlon_mcp.sandboxes.plugins import another_provider
from decathlon_mcp.storage.disk import can_create_in
from decathlon_mcp.telemetry.logs import fields

DELETIONS = 4
"""How many folders are deleted at the same time."""
DELETE_SECONDS = 20.0
"""How long deleting one sandbox's folder may take; it does not count while it waits for others."""
_NAME = re.compile(r"[a-z0-9-]{1,63}")

_log = logging.getLogger(__name__)


class HostProvider(BaseProvider):
    """Opens sandboxes whose first process is a child of the server, each with a folder in `folder`."""

    name = HOST

    def __init__(
        self,
        owner: str,
        folder: Path,
        *,
        isolation: Literal["namespaces", "none"] = "namespaces",
        kernel: type[NamespaceSandbox] = NamespaceSandbox,
        image: Path | None = None,
        hidden: Collection[Path] = (),
        why: str | None = None,
        why_shared: str | None = None,
    ) -> None:
        """`why`: the reason that there is no isolation, for the log. `image`, `hidden`, `why_shared`: see
        `Machine`.
        """
        super().__init__(owner)
        self.isolation: Literal["namespaces", "none"] = isolation
        self._kernel = kernel
        self._folder = folder.absolute()
        self._why = why
        self._machine = Machine(kernel=kernel.kernel, image=image, hidden=hidden, why_shared=why_shared)
        self._identity = ProgramsIdentity()
        self._deletions = Semaphore(DELETIONS)
        # Never waited for: the clock of a deletion, which has its place by then, would already run.
        self._threads = CapacityLimiter(math.inf)
        self._signaller = ProcessSignaller()

    async def __aenter__(self) -> Self:
        if self.isolation == "none":
            _log.warning(
                "The server isolates nothing: what runs in a sandbox can do whatever this user can",
                extra=fields(folder=str(self._folder), why=self._why or "--isolation none"),
            )
        elif self._machine.hidden:
            # A search of all files that sandboxes can read, for up to seconds: not in the event loop.
            await to_thread.run_sync(lambda: self._machine.host_files)
        return await super().__aenter__()

    def connect(
        self,
        channel: Callable[[NamespaceSandbox], socket.socket | None],
        run: Callable[[], Coroutine[Any, Any, object]],
    ) -> None:
        """Give what `Machine.channel` says to sandboxes from now on. `run` runs until this provider ends."""
        self._machine.channel = channel
        self._tasks.start_soon(run)

    @property
    def kernel(self) -> str | None:
        """The name of the sandboxes' kernel, if it is not this machine's."""
        return self._kernel.kernel

    @property
    def snapshots(self) -> bool:
        """See `SnapshotProvider`."""
        return self._kernel.can_be_saved

    @property
    def unlimited(self) -> tuple[LimitName, ...]:
        # Without isolation, `isolation` says it.
        return () if self.isolation == "none" else self._kernel.unlimited(self._machine.hierarchies)

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return self._sandbox(self._owner, spec).root

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        if self.isolation == "none":
            return True
        return spec.network != "none" and self._machine.network is None

    async def environment(self, image: str | None) -> str | None:
        if image is not None:
            try:
                return self._machine.image(image).digest
            except ImageError:
                return None
        identity = await self._identity.identity()
        # Other programs are found than without isolation.
        return identity and (identity if self.isolation == "none" else f"{identity}.namespaces")

    def _sandbox(self, owner: str, spec: SandboxSpec) -> HostSandbox:
        folder = self._folder / spec.name
        if self.isolation == "none":
            return PlainSandbox(owner, spec, folder, self._signaller)
        return self._kernel(owner, spec, folder, self._signaller, self._machine)

    @asynccontextmanager
    async def open(
        self, spec: SandboxSpec, *, snapshot: Snapshot | None = None
    ) -> AsyncGenerator[HostSandbox]:
        """See `SnapshotProvider.open`."""
        sandbox = self._sandbox(self._owner, spec)
        if snapshot is not None:
            await to_thread.run_sync(sandbox.restore, snapshot)
        self._check_name(spec.name)
        # Before there is a folder, which a sweep in a thread could take for an orphan's.
        self._open_names.add(spec.name)
        try:
            sandbox.create_folder()
        except BaseException:
            self._open_names.discard(spec.name)
            raise
        # There is no await before the first process has started, so no cancellation can come between.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._finish_removal, sandbox)
            sandbox.start()
            await self._follow(stack, sandbox)
            await sandbox.wait_until_open()
            yield sandbox

    @asynccontextmanager
    async def reattach(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[HostSandbox]:
        self._check_name(spec.name)
        sandbox = self._sandbox(owner, spec)
        # Not removed: it is another server's.
        if sandbox.folder.exists() and read_owner(sandbox.folder) != owner:
            raise SandboxLostError(f"there is no sandbox named {spec.name} of this owner")
        self._open_names.add(spec.name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._finish_removal, sandbox)
            sandbox.reattach()
            await self._follow(stack, sandbox)
            if sandbox.is_paused:
                # The server may have died before all processes were stopped.
                await sandbox.pause()
            yield sandbox

    async def _follow(self, stack: AsyncExitStack, sandbox: HostSandbox) -> None:
        """Follow a process that has been started or reattached; `stack` then ends it."""
        process = sandbox.first_process
        # Each step alone: a failure must replace neither the body's error nor its result.
        stack.push_async_callback(run_alone, process.close_stream)
        await stack.enter_async_context(self._watching(process))
        # Before the stream is closed: at the end of its input each driver would search /proc for its
        # processes, and several hundred that end together would keep the machine busy with that.
        stack.push_async_callback(run_alone, sandbox.kill)
        stack.callback(sandbox.mark_closed)

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

    async def _finish_removal(self, footprint: Footprint) -> None:
        """Remove a sandbox, even if the caller is cancelled."""
        await finish(self._tasks, lambda: self._remove(footprint))

    async def _remove(self, footprint: Footprint) -> bool:
        """Kill the sandbox's processes and delete its folder; whether both are gone.

        If the processes are not, the folder's content is deleted all the same, except what the next sweep
        needs to find them. Raises what either raises, e.g. OSError.
        """
        killed = deleted = False
        try:
            try:
                killed = await footprint.kill()
            finally:
                deleted = await self._delete(footprint)
            return killed and deleted
        finally:
            # Also if it failed: then the next sweep tries again.
            self._open_names.discard(footprint.name)
            if not (killed and deleted):
                _log.error(
                    "A sandbox could not be removed",
                    extra=fields(sandbox=footprint.name, folder=str(footprint.folder), killed=killed),
                )

    async def _delete(self, footprint: Footprint) -> bool:
        with CancelScope(shield=True):
            async with self._deletions:
                with anyio.move_on_after(DELETE_SECONDS):
                    return await to_thread.run_sync(
                        footprint.delete, limiter=self._threads, abandon_on_cancel=True
                    )
        return False

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        orphans = await to_thread.run_sync(self._orphans_of, owner, set(keep))

        async def remove(name: str) -> bool:
            return await self._remove(Footprint(owner, name, self._folder / name, self._signaller))

        return await remove_all(orphans, remove)

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

    async def check(self, image: str | None) -> list[Finding]:
        if self.isolation == "none":
            plain = await to_thread.run_sync(check_plain, self._why)
            return [*plain, await to_thread.run_sync(check_folder, self._folder)]
        findings = [] if image or self.kernel else check_host_files(self._machine)
        with limited_check(findings):
            try:
                for look in (
                    self._kernel.check_machine,
                    lambda: check_bubblewrap(self._machine, self.unlimited),
                    lambda: [check_folder(self._folder)],
                ):
                    findings += await to_thread.run_sync(look, abandon_on_cancel=True)
                if image is not None or self.kernel is not None:
                    files = self._machine.image(image)
                    detail = f"{files.location}, {files.digest or 'of unknown origin'}"
                    findings.append(Finding("image", True, detail))
                if image is not None or all(result.ok for result in findings):
                    cure = PYTHON_CURE if image else "run the server with a complete Python 3.10 or later"
                    findings.append(await check_python(self.open, image, cure))
            except DecathlonError as error:
                message = ": ".join([error.message, *getattr(error, "__notes__", ())])
                cure = image_cure(error, message) if image or self.kernel else f"{cure_of(message)}; {PLAIN}"
                # The cure names what to install; the message need not name it too.
                problem, _, program = message.partition(": install ")
                detail = problem if program and f"install {program}" in cure else message
                findings.append(Finding("sandbox", False, detail, cure))
            except OSError as error:
                cure = "choose a writable folder with free space (--state)"
                findings.append(Finding("sandbox", False, f"none could be created: {error}", cure))
        return findings


FREE_BYTES = 1 << 30


def check_plain(why: str | None) -> list[Finding]:
    """What `doctor` says of sandboxes without isolation. `why`: the reason for that, if nobody chose it."""
    reason = f" ({why})" if why else ""
    python = shutil.which("python3", path=str(Path(sys.executable).parent))
    return [
        Finding("isolation", True, f"none: sandboxes are processes of this user{reason}"),
        finding(
            "/proc",
            Path("/proc/thread-self/children").exists(),
            "shows which processes belong to a sandbox",
            "sandboxes without isolation require Linux with /proc mounted, and a kernel that lists the "
            f"children of a process there (CONFIG_PROC_CHILDREN), which {another_provider()} does not",
        ),
        finding(
            "python3",
            python is not None,
            f"{python or 'none'} (Python {platform.python_version()})",
            f"there is no python3 next to {sys.executable}: run the server in a virtual environment",
        ),
    ]


def check_host_files(machine: Machine) -> list[Finding]:
    """How sandboxes with this machine's files are isolated, and which network they have."""
    network = f"{shutil.which(PROGRAM)}: leads to other machines and not to this one"
    if machine.why_shared is not None:
        shared = "sandboxes of tasks that need a network share that of this machine"
        network = f"{shared}: {machine.why_shared}"
    isolation = "namespaces: sandboxes see this machine's programs and nothing else of it"
    return [Finding("isolation", True, isolation), Finding("network", True, network)]


def check_bubblewrap(machine: Machine, unlimited: Collection[LimitName]) -> list[Finding]:
    """The program's version, and what limits sandboxes have. Raises ProviderUnavailableError. Blocks."""
    version, is_recent = program_version(machine.program)
    limits = "memory, CPUs and processes"
    if unlimited:
        limits = (
            f"no limit on {', '.join(unlimited)}: the server may not create control groups; run it as root, "
            "or with `systemd-run --user --scope`"
        )
    return [
        finding("program", is_recent, f"{version} at {machine.program}", INSTALL),
        Finding("limits", True, limits),
    ]


def check_folder(folder: Path) -> Finding:
    """Whether the folder of the sandboxes can be used. Blocks."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return finding(
        "folder",
        can_create_in(existing) and free >= FREE_BYTES,
        f"{folder}, {free >> 20} MiB free",
        "choose a writable folder with 1 GiB free (--state)",
    )


def image_cure(error: DecathlonError, message: str) -> str:
    """What to do about a sandbox of an image that could not be opened."""
    if isinstance(error, ImageError):
        return UNPACK
    if lacks_namespaces(message):
        return ALLOW
    if "ermission denied" in message:
        return "the image's folder, and those above it, must be accessible to the owner of its files"
    # What is missing, as its error says.
    _, _, program = message.partition(": install ")
    return f"{f'install {program}' if program else INSTALL}, or use {another_provider()}"
