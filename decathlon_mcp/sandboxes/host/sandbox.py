"""One sandbox that is a process of this machine, with its descendants, and its resources here.

`PlainSandbox` has no isolation, for the starter suite and trusted tasks: what runs inside can read and write
whatever this user can, and reach the network. Requires Linux (/proc).

Decided 2026-11-27: the first process of a plain sandbox is `payloads.subreaper`, and not the driver. It
adopts what a dying driver leaves, so that the processes of a sandbox are known by their ancestors alone. A
control group would say the same where the server may create one, which it may not in most containers, and
they are where there is no isolation. What kills both the first process and the driver, as `pkill -9 python3`
does, leaves processes that nobody knows; it could as well have killed the server.

Decided 2026-11-21: the limits of a spec are not enforced in a plain sandbox. The limits that an ordinary
process can have (RLIMIT_AS, RLIMIT_NPROC) do not mean what a container's limits mean.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.abc import ByteStream

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.errors import (
    BadRequestError,
    ImageError,
    ProviderUnavailableError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.base import CAUSE_SECONDS, SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.sandboxes.host.cgroups import Group, is_group
from decathlon_mcp.sandboxes.host.first_process import FirstProcess, Launch
from decathlon_mcp.sandboxes.host.network import NetworkHelper, end_helper
from decathlon_mcp.sandboxes.host.processes import ProcessId, ProcessSignaller, is_stopped
from decathlon_mcp.sandboxes.host.sandbox_folder import (
    GROUPS_FILE,
    HELPER_FILE,
    LEADER_FILE,
    RECORDS,
    closing_descriptor,
    create_folder,
    own_folder,
    read_process,
    read_record,
    remove_folder,
    write_process,
)
from decathlon_mcp.sandboxes.streams import EndedStream
from decathlon_mcp.telemetry.logs import fields

_log = logging.getLogger(__name__)


class Footprint:
    """What one sandbox occupies: processes, a control group and a folder, any of which may be missing.

    The folder names the others, so that any server can remove what a dead server has left, whatever kind of
    sandbox it was.
    """

    def __init__(self, owner: str, name: str, folder: Path, signaller: ProcessSignaller) -> None:
        self.owner = owner
        self.name = name
        self.folder = folder
        self.process: FirstProcess | None = None
        """What this server has started or reattached."""
        self.group = Group(set())
        self._killed: bool | None = None
        """Whether the processes could be killed; None before it was tried."""
        self._signaller = signaller
        self._leader: ProcessId | None = None
        self._helper: NetworkHelper | None = None

    @property
    def leader(self) -> ProcessId | None:
        """The first process; None if it is not known."""
        if self._leader is None and self.process is None:
            self._leader = read_process(self.folder, LEADER_FILE)
        return self._leader

    @property
    def root_process(self) -> ProcessId | None:
        """The process that all others of the sandbox descend from, as far as it is known."""
        return self.leader or (None if self.process is None else self.process.id)

    async def kill(self) -> bool:
        """Kill all processes, unless that was tried before; whether they are gone."""
        if self._killed is None:
            with CancelScope(shield=True):
                self._killed = await self._signaller.kill(self.root_process)
        return bool(self._killed)

    def delete(self) -> bool:
        """Reap the first process, release the rest and delete the folder, after the processes were killed.

        Returns whether all is gone. If the processes could not be killed, what the next server needs to find
        them stays. Raises OSError, ProviderUnavailableError. Blocks.
        """
        try:
            if self.process is not None:
                self.process.reap()
        finally:
            gone = self._release()
            if gone:
                # If some file cannot be deleted now, a later sweep finds the folder by the owner's.
                with own_folder(self.folder.parent) as parent:
                    remove_folder(self.folder.name, parent, last=RECORDS, keep_last=not self._killed)
        return gone

    def _release(self) -> bool:
        """Remove what is neither a process inside nor in the folder; whether it is gone. Blocks."""
        if self._helper is not None:
            has_ended = self._helper.end()
        else:
            helper = read_process(self.folder, HELPER_FILE)
            has_ended = helper is None or end_helper(helper)
        return has_ended and (self.group if self.group.folders else self._recorded_group()).remove()

    def _recorded_group(self) -> Group:
        lines = (read_record(self.folder, GROUPS_FILE) or "").splitlines()
        return Group({folder for folder in map(Path, lines) if is_group(folder, self._group_name)})

    @property
    def _group_name(self) -> str:
        return f"decathlon-{self.owner}-{self.name}"


class HostSandbox(Footprint, ABC):
    """See `base.Sandbox`. Its kinds differ in how the first process starts and where its files are."""

    can_be_saved = False
    subfolders: Sequence[str] = ()
    """Created in the sandbox's folder."""
    image_digest: str | None = None

    def __init__(self, owner: str, spec: SandboxSpec, folder: Path, signaller: ProcessSignaller) -> None:
        super().__init__(owner, spec.name, folder, signaller)
        self.spec = spec
        self._threads = CapacityLimiter(4)
        self._closed = False
        self._paused = False
        self._ended_stream: EndedStream | None = None

    @abstractmethod
    def start(self) -> None:
        """Start the first process, for which `process` then has a value. Must not block for long.

        Raises ImageError, BadRequestError, ProviderUnavailableError.
        """

    async def wait_until_open(self) -> None:
        """Wait until what was started is a sandbox.

        Raises SandboxLostError, ImageError, ProviderUnavailableError.
        """

    @property
    @abstractmethod
    def root(self) -> PurePosixPath: ...

    @abstractmethod
    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None: ...

    @abstractmethod
    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None: ...

    def create_folder(self) -> None:
        """Raises BadRequestError if there is already one, ProviderUnavailableError."""
        create_folder(self.folder, self.owner, self.subfolders)

    def restore(self, snapshot: Snapshot) -> None:
        """Let `start` begin with what was saved. Raises SnapshotError. Blocks."""
        raise SnapshotError("sandboxes with this kernel cannot be opened from a snapshot")

    def _launch(self, launch: Launch) -> None:
        """Start a process, and note it for the next server. Raises ProviderUnavailableError."""
        try:
            self.process = FirstProcess.start(launch, self.folder)
        except OSError as error:
            raise ProviderUnavailableError(
                f"{launch.command[0]} cannot be started: {error.strerror}"
            ) from error
        if self.process.id is not None:
            write_process(self.folder / LEADER_FILE, self.process.id)

    def reattach(self) -> None:
        """Continue what a server with this owner has left. Raises SandboxLostError if that has ended."""
        leader = read_process(self.folder, LEADER_FILE)
        if leader is None:
            raise SandboxLostError(f"nothing is left of the sandbox {self.name}")
        self.group = self._recorded_group()
        try:
            self.process = FirstProcess.reattach(leader, self.folder)
        except SandboxLostError as error:
            if (cause := self._cause_of_end(None)) is None:
                raise
            raise SandboxLostError(f"{error.message} ({cause})", cause=cause) from None
        self._leader = leader
        if self._was_paused():
            self._paused, self._ended_stream = True, EndedStream()

    def _was_paused(self) -> bool:
        """Whether the server that opened it has paused it."""
        return self._leader is not None and is_stopped(self._leader)

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def first_process(self) -> FirstProcess:
        assert self.process is not None, "it has been started"
        return self.process

    @property
    def stream(self) -> ByteStream:
        return self._ended_stream or self.first_process.stream

    async def reopen(self) -> None:
        self._check_open()
        if self._paused:
            raise SandboxLostError("the sandbox is paused")
        await self.first_process.reopen()

    @property
    def log_tail(self) -> str:
        if not self._closed:
            self.first_process.read_log()
        return str(self.first_process.log_tail)

    async def pause(self) -> None:
        self._check_open()
        if self.first_process.ended.is_set():
            raise SandboxLostError("the sandbox's first process has ended")
        self._paused = True
        if not await self._stop_processes():
            _log.warning("Processes of a sandbox did not stop", extra=fields(sandbox=self.name))

    async def _stop_processes(self) -> bool:
        """Stop all processes; whether they have."""
        return await self._signaller.stop(self.root_process)

    async def cause_of_end(self) -> str | None:
        process, root = self.first_process, self.root_process
        # Who found that it is gone may be ahead of the streams, which are read later.
        if process.stream.ended.is_set() or (root is not None and root.read() is None):
            with anyio.move_on_after(CAUSE_SECONDS):
                await process.ended.wait()
        return self._cause_of_end(process.exit_code) if process.ended.is_set() else None

    def _cause_of_end(self, exit_code: int | None) -> str | None:
        """Why the first process ended. `exit_code`: as its parent knows it."""
        return None if exit_code is None else f"exit code {exit_code}"

    async def is_running(self) -> bool:
        return not (self._closed or self._paused or self.first_process.ended.is_set())

    def mark_closed(self) -> None:
        """From now on, methods raise SandboxLostError."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")


ROOT, TEMPORARY = "root", "tmp"


class PlainSandbox(HostSandbox):
    """See `HostSandbox`. `put` and `get` accept only folders at or below its root."""

    subfolders = (ROOT, TEMPORARY)

    @property
    def root(self) -> PurePosixPath:
        return PurePosixPath(self.folder / ROOT)

    def start(self) -> None:
        environment = _environment(self.folder)
        if shutil.which(self.spec.command[0], path=environment["PATH"]) is None:
            raise ImageError(f"this machine has no {self.spec.command[0]} on its PATH")
        waiting, go = os.pipe()
        with closing_descriptor(go):
            with closing_descriptor(waiting):
                program = (sys.executable, "-I", "-S", "-c", source("subreaper"), str(waiting))
                self._launch(
                    Launch(
                        command=(*program, *self.spec.command),
                        cwd=self.folder / ROOT,
                        environment=environment,
                        survives=self.spec.survives,
                        descriptors=(waiting,),
                    )
                )
            # The command starts now: of a server that was killed before, nothing runs that the next one does
            # not find.
            os.write(go, b"1")

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        target = self._host_path(folder)
        await to_thread.run_sync(
            lambda: unpack(archive, target, below=Path(self.root)),
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        source = self._host_path(folder)
        await to_thread.run_sync(
            lambda: pack_folder(source, archive, limit_bytes, below=Path(self.root)),
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    def _host_path(self, folder: PurePosixPath) -> Path:
        self._check_open()
        if not folder.is_relative_to(self.root) or ".." in folder.parts:
            raise BadRequestError(f"{folder} is not below the sandbox's root, {self.root}")
        return Path(folder)


def _environment(folder: Path) -> Mapping[str, str]:
    """The server's own variables without its settings; temporary files go to the sandbox's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    # `python3` is the server's own Python. Not resolved: a virtual environment is recognized by the path.
    python_folder = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((python_folder, inherited.get("PATH", os.defpath))),
        "TMPDIR": str(folder / TEMPORARY),
    }
