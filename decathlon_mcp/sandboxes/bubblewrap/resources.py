"""What one sandbox occupies on this machine: processes, a control group, and a folder that names both."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY, Limits, SandboxSpec
from decathlon_mcp.sandboxes.bubblewrap.cgroups import Group, Hierarchies, is_group
from decathlon_mcp.sandboxes.bubblewrap.command import SandboxFiles, bubblewrap_command
from decathlon_mcp.sandboxes.bubblewrap.image_folder import SANDBOX_USER
from decathlon_mcp.sandboxes.bubblewrap.mounts import RootFiles, file_with
from decathlon_mcp.sandboxes.bubblewrap.network import NetworkHelper, OwnNetwork, end_helper
from decathlon_mcp.sandboxes.bubblewrap.seccomp import compile_filter
from decathlon_mcp.sandboxes.processes.first_process import FirstProcess, Launch
from decathlon_mcp.sandboxes.processes.resources import (
    LEADER_FILE,
    RECORDS,
    ProcessResources,
    closing_descriptor,
    read_process,
    read_record,
    write_process,
)
from decathlon_mcp.sandboxes.processes.table import ProcessId
from decathlon_mcp.storage.disk import read_kernel_file
from decathlon_mcp.types import as_object

GROUPS_FILE = "groups"
"""In a sandbox's folder: the folders of its control group, one a line."""
STATUS_FILE = "status"
"""In a sandbox's folder: what bubblewrap writes about the first process."""
HELPER_FILE = "network"
"""In a sandbox's folder: which process connects its network, as in `LEADER_FILE`."""
_KILLED_EXIT_CODE = 137
_CAP_SYS_RESOURCE = 1 << 24
STATUS_BYTES = 4096
# Joins the control groups whose files come before `--`, then executes the rest.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """What all sandboxes of a provider need of this machine.

    `program` is the path of bwrap. `launcher` is a command line that executes the rest of it. `network`: how
    sandboxes get one of their own; None if they cannot.
    """

    program: str
    hierarchies: Hierarchies
    launcher: tuple[str, ...] = ()
    network: OwnNetwork | None = None


def user_of(root: RootFiles) -> tuple[int, int] | None:
    """The user and group that sandboxes run as on this machine; None for the server's own."""
    if os.geteuid() != 0:
        return None
    user, group = root.owner
    return (user, group) if user else (SANDBOX_USER, SANDBOX_USER)


def as_user(user: tuple[int, int] | None) -> list[str]:
    """A command line that executes the rest of it as this user and group."""
    if user is None:
        return []
    return ["setpriv", f"--reuid={user[0]}", f"--regid={user[1]}", "--clear-groups"]


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


def read_status(content: bytes) -> dict[str, object]:
    """What bubblewrap writes about a sandbox: JSON objects, one a line; a line that is cut is ignored."""
    values: dict[str, object] = {}
    for line in content[:STATUS_BYTES].splitlines():
        with suppress(ValueError):
            values |= as_object(json.loads(line)) or {}
    return values


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath)}


class BubblewrapResources(ProcessResources):
    """The process that is started is bubblewrap's, which waits for the first process, its child.

    It is noted for the next server until that child is known.
    """

    records = (*RECORDS, GROUPS_FILE, HELPER_FILE)

    def __init__(self, owner: str, name: str, folder: Path) -> None:
        super().__init__(owner, name, folder)
        self.group = Group(set())
        self._leader: ProcessId | None = None
        self._set_up: HasFileno | None = None
        self._helper: NetworkHelper | None = None

    @property
    def leader(self) -> ProcessId | None:
        if self._leader is None and self.process is None:
            self._leader = super().leader
        return self._leader

    @property
    def root_process(self) -> ProcessId | None:
        return self.leader or self.monitor

    @property
    def monitor(self) -> ProcessId | None:
        """bubblewrap's process outside; None if another server has started it."""
        return None if self.process is None or self.process.id == self._leader else self.process.id

    def start(self, spec: SandboxSpec, root: RootFiles, host: Host) -> None:
        """Start bubblewrap, and call `mark_set_up` when `set_up` can be read.

        Raises ProviderUnavailableError.
        """
        with ExitStack() as stack:
            self._create_group(spec, host.hierarchies)
            command, descriptors = self._command(spec, root, host, stack)
            launcher = [*self._in_group(), *host.launcher, *as_user(user_of(root))]
            launch = Launch(
                command=(*launcher, *command),
                cwd=Path("/"),
                environment=_environment(),
                survives=spec.survives,
                descriptors=descriptors,
            )
            try:
                self.process = FirstProcess.start(launch, self.folder)
            except OSError as error:
                raise ProviderUnavailableError(
                    f"{launch.command[0]} cannot be started: {error.strerror}"
                ) from error
            if self.process.id is not None:
                write_process(self.folder / LEADER_FILE, self.process.id)

    def _command(
        self, spec: SandboxSpec, root: RootFiles, host: Host, stack: ExitStack
    ) -> tuple[Sequence[str], tuple[int, ...]]:
        """The command line of bubblewrap, and the descriptors that it inherits, which `stack` closes.

        Sets what `set_up` returns.
        """
        files = self._open_files(spec, stack)
        command, descriptors = bubblewrap_command(
            host.program,
            spec,
            root,
            files,
            stack,
            shares_network=spec.network != "none" and host.network is None,
        )
        return command, (*files.descriptors, *descriptors)

    def _in_group(self) -> list[str]:
        """A command line that executes the rest of it in the control group."""
        if not self.group.folders:
            return []
        return ["/bin/sh", "-c", _JOIN, "sh", *map(str, self.group.process_files), "--"]

    async def connect(self, network: OwnNetwork, user: tuple[int, int] | None) -> None:
        """Connect the network of a sandbox that is set up. `user`: see `user_of`.

        Raises SandboxLostError if the first process has ended, ProviderUnavailableError.
        """
        process, leader = self.process, self.leader
        assert process is not None
        if leader is None:
            raise SandboxLostError("the sandbox's first process has ended")
        self._helper = NetworkHelper.start(
            network,
            leader,
            hang_up=process.stderr,
            launcher=[*self._in_group(), *network.launcher, *as_user(user)],
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

    def _disconnect(self) -> bool:
        """End what connects the network; whether it has ended. Blocks."""
        if self._helper is not None:
            return self._helper.end()
        helper = read_process(self.folder, HELPER_FILE)
        return helper is None or end_helper(helper)

    def _new_file(self, name: str, stack: ExitStack) -> int:
        """A descriptor of a new file in the sandbox's folder, to append to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.folder / name, flags, 0o600)
        stack.callback(os.close, descriptor)
        return descriptor

    def _open_files(self, spec: SandboxSpec, stack: ExitStack) -> SandboxFiles:
        status = self._new_file(STATUS_FILE, stack)
        ours, block = socket.socketpair()
        self._set_up = ours
        stack.callback(block.close)
        ours.setblocking(False)
        ours.send(b"1")
        return SandboxFiles(
            status=status,
            block=block.fileno(),
            seccomp=stack.enter_context(
                closing_descriptor(file_with(compile_filter(fixed_addresses=spec.dense)))
            ),
        )

    def _create_group(self, spec: SandboxSpec, hierarchies: Hierarchies) -> None:
        self.group = hierarchies.group(self._group_name)
        # Before it exists: of a server that is killed meanwhile, the next one knows what to remove.
        (self.folder / GROUPS_FILE).write_text("".join(f"{folder}\n" for folder in self.group.folders))
        try:
            self.group.create(self._group_limits(spec.limits))
        except OSError as error:
            raise ProviderUnavailableError(
                f"no control group could be created: {error.strerror}; see `decathlon-mcp doctor`"
            ) from error

    def _group_limits(self, limits: Limits) -> Limits:
        """The limits of the control group of a sandbox that has these."""
        return limits

    @property
    def set_up(self) -> HasFileno:
        """Can be read when the sandbox is set up, or when bubblewrap has ended."""
        assert self._set_up is not None, "another server has started it"
        return self._set_up

    def mark_set_up(self, spec: SandboxSpec, hierarchies: Hierarchies) -> bool:
        """Note the first process, whose files are the sandbox's from now on; whether there is one."""
        process = self.process
        assert process is not None
        leader = self._started_leader
        if leader is None or process.id is None:
            return False
        self._leader = leader
        write_process(self.folder / LEADER_FILE, leader)
        # It needs nothing, and the kernel shall not kill it for what others need.
        self.group.dismiss(process.id.pid)
        self._limit_processes(spec, leader, hierarchies)
        return True

    def _limit_processes(self, spec: SandboxSpec, leader: ProcessId, hierarchies: Hierarchies) -> None:
        if spec.limits.pids is not None and "pids" in hierarchies.unlimited and can_limit_processes():
            with suppress(OSError):
                limits = (spec.limits.pids, spec.limits.pids)
                resource.prlimit(leader.pid, resource.RLIMIT_NPROC, limits)

    @property
    def has_run(self) -> bool:
        """Whether the first process was executed and has ended."""
        return "exit-code" in self._status()

    @property
    def _started_leader(self) -> ProcessId | None:
        """The first process, by what bubblewrap has written; None if it has not, or if that has ended."""
        pid, process = self._status().get("child-pid"), self.process
        if process is None or process.id is None or not isinstance(pid, int):
            return None
        return process.id.child(pid)

    def take_back(self) -> ProcessId:
        self.group = self._recorded_group()
        try:
            self._leader = super().take_back()
        except SandboxLostError as error:
            if (cause := self.cause_of_end()) is None:
                raise
            raise SandboxLostError(f"{error.message} ({cause})", cause=cause) from None
        return self._leader

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

    def cause_of_end(self, exit_code: int | None = None) -> str | None:
        known = self._status().get("exit-code")
        code = known if isinstance(known, int) else exit_code
        if code in (None, _KILLED_EXIT_CODE) and self.group.was_out_of_memory:
            return OUT_OF_MEMORY
        return super().cause_of_end(code)

    def kill_first_process(self) -> bool:
        """Kill the first process, with which the kernel kills all others; whether that was possible."""
        # If the opening was cancelled, it is not noted yet.
        leader, monitor = self.leader or self._started_leader, self.monitor
        if leader is None or monitor is None:
            return False
        with suppress(OSError):
            leader.send(signal.SIGKILL)
        with suppress(OSError):
            # Not reaped yet, so that its number is its own. It may have been stopped with the others.
            os.kill(monitor.pid, signal.SIGCONT)
        return True

    def release(self) -> bool:
        if self._set_up is not None:
            self._set_up.close()
        if not self._disconnect():
            return False
        group = self.group if self.group.folders else self._recorded_group()
        return group.remove()

    def _recorded_group(self) -> Group:
        lines = (read_record(self.folder, GROUPS_FILE) or "").splitlines()
        return Group({folder for folder in map(Path, lines) if is_group(folder, self._group_name)})

    @property
    def _group_name(self) -> str:
        return f"decathlon-{self.owner}-{self.name}"

    def _status(self) -> dict[str, object]:
        """What bubblewrap has written."""
        return read_status((read_record(self.folder, STATUS_FILE) or "").encode())
