"""One sandbox in namespaces of its own, which bubblewrap creates without a daemon and without being root.

Inside, the root file system is read-only; the suite's root, the user's home, /tmp, /run and /var/tmp are file
systems in memory of limited size, which are reached through the first process. Processes have no
capabilities, no way to gain any, and a filter of system calls (`seccomp`).

Decided 2026-11-22: a sandbox never runs as the machine's root, whose files it could then change where the
kernel asks for no capability (/proc/sys, the permissions of /dev/null). If the server is root, sandboxes run
as the owner of the image's files, or if that is root, as a user that belongs to nobody.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

import anyio
from anyio import to_thread
from decathlon_sandbox import wire

from decathlon_mcp.archives.packing import FolderCursor, pack_at
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.errors import (
    BadRequestError,
    ImageError,
    LimitExceededError,
    NotRunnableError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.sandboxes.base import (
    OUT_OF_MEMORY,
    SCRATCH,
    Finding,
    LimitName,
    Limits,
    SandboxSpec,
    check_folder,
)
from decathlon_mcp.sandboxes.capabilities import Usage
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from decathlon_mcp.sandboxes.host.command import Machine, as_user, bubblewrap_command, read_status, user_of
from decathlon_mcp.sandboxes.host.first_process import Launch
from decathlon_mcp.sandboxes.host.mounts import RootFiles, view_launcher, writable_folders
from decathlon_mcp.sandboxes.host.network import NetworkHelper, OwnNetwork
from decathlon_mcp.sandboxes.host.processes import ProcessId, ProcessSignaller
from decathlon_mcp.sandboxes.host.root_unpacking import unpack_inside
from decathlon_mcp.sandboxes.host.sandbox import HostSandbox
from decathlon_mcp.sandboxes.host.sandbox_folder import (
    GROUPS_FILE,
    HELPER_FILE,
    LEADER_FILE,
    closing_descriptor,
    read_record,
    write_process,
)
from decathlon_mcp.sandboxes.plugins import another_provider
from decathlon_mcp.storage.disk import read_kernel_file
from decathlon_mcp.telemetry.logs import fields

STATUS_FILE = "status"
"""In a sandbox's folder: what bubblewrap writes about the first process."""
SET_UP_SECONDS = 30.0
"""How long bubblewrap may take to set up a sandbox; usually some 10 ms."""
_KILLED_EXIT_CODE = 137
_CAP_SYS_RESOURCE = 1 << 24
# Joins the control groups whose files come before `--`, then executes the rest.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'

_log = logging.getLogger(__name__)


def why_no_network() -> str:
    """Why sandboxes with the files of an unpacked image have no network: the end of a sentence."""
    return f"sandboxes of an unpacked image have no outbound network: use {another_provider()}"


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class NamespaceSandbox(HostSandbox):
    """See `HostSandbox`. A subclass has another kernel, which this class is the hook for (`hooks.Plugin`).

    The process that is started is bubblewrap's, which waits for the first process, its child. It is noted for
    the next server until that child is known. `put` accepts folders at or below the suite's root and the
    user's home, since everything else belongs to the image.
    """

    kernel: str | None = None
    """The name of a kernel that is not this machine's."""

    def __init__(
        self, owner: str, spec: SandboxSpec, folder: Path, signaller: ProcessSignaller, machine: Machine
    ) -> None:
        super().__init__(owner, spec, folder, signaller)
        self._machine = machine
        self._set_up: HasFileno | None = None
        """Can be read when the sandbox is set up, or when bubblewrap has ended."""

    @classmethod
    def unlimited(cls, hierarchies: Hierarchies) -> tuple[LimitName, ...]:
        """See `Provider.unlimited`."""
        names = hierarchies.unlimited
        return tuple(name for name in names if name != "pids" or not can_limit_processes())

    @classmethod
    def check_machine(cls) -> list[Finding]:
        """What `doctor` says of the kernel. Raises ProviderUnavailableError. Blocks."""
        return []

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    @cached_property
    def files(self) -> RootFiles:
        """What it starts with. Raises ImageError."""
        return self._machine.files(self.spec)

    @property
    def image_digest(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.files.digest

    @property
    def _user(self) -> tuple[int, int] | None:
        """The user and group of its processes on this machine, if they are not the server's own."""
        return user_of(self.files)

    def start(self) -> None:
        """Start bubblewrap. See `wait_until_open`."""
        files = self.files
        if self.spec.network != "none" and files.location is not None:
            raise NotRunnableError(why_no_network())
        program = self.spec.command[0]
        if files.find_program(program) is None:
            where = "this machine" if files.location is None else f"image {files.location}"
            raise ImageError(f"{where} has no {program} on its PATH", image=str(files.location or ""))
        with ExitStack() as stack:
            self._create_group()
            command, descriptors = self._command(stack)
            launcher = [*self._in_group(), *view_launcher(files.reached), *as_user(self._user)]
            self._launch(
                Launch(
                    command=(*launcher, *command),
                    cwd=Path("/"),
                    environment=_environment(),
                    survives=self.spec.survives,
                    descriptors=descriptors,
                )
            )

    def _command(self, stack: ExitStack) -> tuple[Sequence[str], tuple[int, ...]]:
        """The command line of bubblewrap, and the descriptors that it inherits, which `stack` closes.

        Sets `_set_up`.
        """
        variables: dict[str, str] = {}
        inherited: tuple[int, ...] = ()
        if (channel := self._machine.channel(self)) is not None:
            stack.callback(channel.close)
            inherited = (channel.fileno(),)
            variables[wire.PRELOAD_VARIABLE] = str(channel.fileno())
        command = bubblewrap_command(
            self._machine.program,
            self.spec,
            self.files,
            self._new_file(STATUS_FILE, stack),
            stack,
            shares_network=self.spec.network != "none" and self._machine.network is None,
            variables=variables,
        )
        self._set_up = command.set_up
        return command.argv, (*command.descriptors, *inherited)

    def _new_file(self, name: str, stack: ExitStack) -> int:
        """A descriptor of a new file in the sandbox's folder, to append to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return stack.enter_context(closing_descriptor(os.open(self.folder / name, flags, 0o600)))

    def _create_group(self) -> None:
        self.group = self._machine.hierarchies.group(self._group_name)
        # Before it exists: of a server that is killed meanwhile, the next one knows what to remove.
        (self.folder / GROUPS_FILE).write_text("".join(f"{folder}\n" for folder in self.group.folders))
        try:
            self.group.create(self._group_limits(self.spec.limits))
        except OSError as error:
            raise ProviderUnavailableError(
                f"no control group could be created: {error.strerror}; see `decathlon-mcp doctor`"
            ) from error

    def _group_limits(self, limits: Limits) -> Limits:
        """The limits of the control group of a sandbox that has these."""
        return limits

    def _in_group(self) -> list[str]:
        """A command line that executes the rest of it in the control group."""
        if not self.group.folders:
            return []
        return ["/bin/sh", "-c", _JOIN, "sh", *map(str, self.group.process_files), "--"]

    async def wait_until_open(self) -> None:
        await self._wait_until_set_up()
        network = None if self.spec.network == "none" else self._machine.network
        if network is None:
            return
        # The first process may have ended already.
        with suppress(SandboxLostError):
            with anyio.move_on_after(SET_UP_SECONDS):
                await self._connect(network)
                return
            raise ProviderUnavailableError(
                f"the network of a sandbox was not ready after {SET_UP_SECONDS:g} s"
            )

    async def _wait_until_set_up(self) -> None:
        process, set_up = self.first_process, self._set_up
        assert set_up is not None
        with anyio.move_on_after(SET_UP_SECONDS):
            await anyio.wait_readable(set_up)
            if self._note_first_process():
                with suppress(SandboxLostError):
                    os.close(self.open_root())
                    return
            await process.ended.wait()
        if self.has_run:
            return
        process.read_log()
        # It names paths of this machine, which are not for clients: a note is for `doctor` alone.
        reason = str(process.log_tail)
        _log.warning("bubblewrap created no sandbox", extra=fields(sandbox=self.name, why=reason))
        error = ProviderUnavailableError("bubblewrap created no sandbox; the server's log has its reason")
        error.add_note(reason)
        raise error

    def _note_first_process(self) -> bool:
        """Note the first process, whose files are the sandbox's from now on; whether there is one."""
        process, leader = self.first_process, self._started_leader
        if leader is None or process.id is None:
            return False
        self._leader = leader
        write_process(self.folder / LEADER_FILE, leader)
        # It needs nothing, and the kernel shall not kill it for what others need.
        self.group.dismiss(process.id.pid)
        self._limit_processes(leader)
        return True

    def _limit_processes(self, leader: ProcessId) -> None:
        pids, hierarchies = self.spec.limits.pids, self._machine.hierarchies
        if pids is not None and "pids" in hierarchies.unlimited and can_limit_processes():
            with suppress(OSError):
                resource.prlimit(leader.pid, resource.RLIMIT_NPROC, (pids, pids))

    async def _connect(self, network: OwnNetwork) -> None:
        """Raises SandboxLostError if the first process has ended, ProviderUnavailableError."""
        if self.leader is None:
            raise SandboxLostError("the sandbox's first process has ended")
        self._helper = NetworkHelper.start(
            network,
            self.leader,
            hang_up=self.first_process.stderr,
            launcher=[*self._in_group(), *network.launcher, *as_user(self._user)],
            environment=_environment(),
        )
        if self._helper.id is not None:
            write_process(self.folder / HELPER_FILE, self._helper.id)
        try:
            await self._helper.wait_until_ready()
        except ProviderUnavailableError:
            # That is no fault if the first process has ended meanwhile.
            os.close(self.open_root())
            raise

    @property
    def has_run(self) -> bool:
        """Whether the first process was executed and has ended."""
        return "exit-code" in self._status()

    @property
    def root_process(self) -> ProcessId | None:
        # If the opening was cancelled, the first process is not noted yet.
        return self.leader or self._started_leader or super().root_process

    @property
    def _started_leader(self) -> ProcessId | None:
        """The first process, by what bubblewrap has written; None if it has not, or if that has ended."""
        pid, process = self._status().get("child-pid"), self.process
        if process is None or process.id is None or not isinstance(pid, int):
            return None
        return process.id.child(pid)

    def _status(self) -> dict[str, object]:
        """What bubblewrap has written."""
        return read_status((read_record(self.folder, STATUS_FILE) or "").encode())

    def open_root(self) -> int:
        """A descriptor of the sandbox's root. Raises SandboxLostError if the first process has ended."""
        leader = self.leader
        try:
            if leader is not None:
                descriptor = os.open(f"/proc/{leader.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                own, other = Path("/").stat(), os.fstat(descriptor)
                # Looked at after the file is open: the number may belong to another process by now.
                if ProcessId.of(leader.pid) == leader and not os.path.samestat(own, other):
                    return descriptor
                os.close(descriptor)
        except OSError:
            pass
        raise SandboxLostError("the sandbox's first process has ended")

    def _cause_of_end(self, exit_code: int | None) -> str | None:
        known = self._status().get("exit-code")
        code = known if isinstance(known, int) else exit_code
        if code in (None, _KILLED_EXIT_CODE) and self.group.was_out_of_memory:
            return OUT_OF_MEMORY
        return super()._cause_of_end(code)

    def _release(self) -> bool:
        if self._set_up is not None:
            self._set_up.close()
        return super()._release()

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        self._check_open()
        writable = [
            place.path
            for place in writable_folders(self.files, self.spec.root, self.spec.limits)
            if place.path != SCRATCH
        ]
        below = next((path for path in writable if folder.is_relative_to(path)), None)
        if below is None or ".." in folder.parts:
            places = ", ".join(map(str, writable))
            raise BadRequestError(f"files are copied to places at or below {places}, not to {folder}")
        await self._run(lambda: self._unpack(folder, below, archive))

    def _unpack(self, folder: PurePosixPath, below: PurePosixPath, archive: ArchiveSource) -> None:
        """`put`. `below`: the writable folder that `folder` is, or is in. Blocks."""
        try:
            with closing_descriptor(self.open_root()) as root:
                unpack_inside(archive, root, folder, below=below, user=self._user)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise files_do_not_fit(folder) from error

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        self._check_open()
        check_folder(folder)
        await self._run(lambda: self._pack(folder, archive, limit_bytes))

    def _pack(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        """`get`. Blocks."""
        with closing_descriptor(self.open_root()) as root, FolderCursor(root) as cursor:
            pack_at(cursor, folder.parts[1:], archive, limit_bytes)

    async def usage(self, sandboxes: int) -> Usage:
        """See `MeasuredSandbox`. Its files are in its memory."""
        return await to_thread.run_sync(self.group.usage, limiter=self._threads)

    async def _run(self, work: Callable[[], None]) -> None:
        await to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)


def can_limit_processes() -> bool:
    """Whether RLIMIT_NPROC limits the processes of one sandbox.

    The kernel counts them in each user namespace since 5.14. The limit must be set after the namespace
    exists: before, it would limit all processes of the server's user. That needs the same user or
    CAP_SYS_RESOURCE.
    """
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    try:
        status = read_kernel_file(Path("/proc/self/status"))
    except OSError:
        return False
    capabilities = int(re.findall(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)[0], 16)
    return version >= (5, 14) and (os.geteuid() != 0 or bool(capabilities & _CAP_SYS_RESOURCE))


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath)}


def files_do_not_fit(folder: PurePosixPath) -> LimitExceededError:
    return LimitExceededError(f"the files for {folder} do not fit into the sandbox's memory", budget="memory")
