"""One local sandbox: a folder, a process with its descendants, and what removes them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import ByteStream

from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource, pack_folder
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.local.first_process import FirstProcess
from decathlon_mcp.sandboxes.local.process_signals import ProcessSignaller
from decathlon_mcp.sandboxes.local.process_table import ProcessId, ProcessTree
from decathlon_mcp.sandboxes.streams import EndedStream
from decathlon_mcp.telemetry.logs import fields

CAUSE_SECONDS = 2.0
OWNER_FILE = "owner"
"""In a sandbox's folder: the owner of the provider that opened it."""
LEADER_FILE = "leader"
"""In a sandbox's folder: which process is the first one, as `<pid> <started_ticks> <boot id>`."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


class LocalResources:
    """What one local sandbox occupies on the machine: processes and a folder, any of which may be missing."""

    def __init__(self, owner: str, name: str, folder: Path) -> None:
        self.owner = owner
        self.name = name
        self.folder = folder
        self.process: FirstProcess | None = None
        self.killed: bool | None = None
        """Whether the processes could be killed; None before it was tried."""

    @property
    def process_tree(self) -> ProcessTree:
        leader = _read_leader(self.folder) if self.process is None else self.process.id
        return ProcessTree(self.owner, self.name, leader)

    def create_folders(self) -> None:
        """Create the folder with its contents. Raises BadRequestError if there is already one."""
        # Complete when it gets its name: of a server that is killed meanwhile, the owner of every folder is
        # known.
        new = self.folder.with_name(unfinished_folder_prefix(self.owner) + self.name)
        new.mkdir(parents=True)
        (new / OWNER_FILE).write_text(self.owner, "utf-8")
        (new / "root").mkdir()
        (new / "tmp").mkdir()
        try:
            new.rename(self.folder)
        except OSError:
            shutil.rmtree(new)
            raise BadRequestError(f"there is already a sandbox named {self.name}") from None

    def start(self, spec: SandboxSpec) -> None:
        """Raises ImageError."""
        self.process = FirstProcess.start(spec, self.folder, f"{self.owner}/{self.name}")
        if self.process.id is not None:
            _write_leader(self.folder, self.process.id)

    def take_back(self) -> ProcessId:
        """Continue what a server with this owner has left; returns its first process.

        Raises SandboxLostError if that has ended.
        """
        leader = _read_leader(self.folder)
        if leader is None:
            raise SandboxLostError(f"nothing is left of the sandbox {self.name}")
        self.process = FirstProcess.take_back(leader, self.folder)
        return leader

    def delete(self) -> bool:
        """Reap the first process and delete the folder, after the processes were killed. Blocks.

        Returns whether the folder is gone.
        """
        if self.process is not None:
            self.process.reap()
        # The owner's file last: if some file cannot be deleted now, a later sweep finds the folder by it.
        for folder in (self.folder / "root", self.folder / "tmp", self.folder):
            shutil.rmtree(folder, onerror=_retry_with_permissions)
            if folder.exists():
                return False
        return True


# The driver's environment, which has its sandbox's marker, can be read by root alone. Another server that
# removes what a dead one left must find a driver that is stopped, and so did not end with its server.


def unfinished_folder_prefix(owner: str) -> str:
    """How names of folders begin that a server with this owner has not finished creating."""
    return f".{owner}."


def read_owner(folder: Path) -> str | None:
    """Owner of the sandbox in a folder; None if there is no sandbox."""
    # Another server that uses this folder may remove its sandbox meanwhile.
    try:
        return (folder / OWNER_FILE).read_text("utf-8", "replace")
    except FileNotFoundError:
        return None


def _write_leader(folder: Path, leader: ProcessId) -> None:
    boot_id = _BOOT_ID.read_text("utf-8").strip()
    (folder / LEADER_FILE).write_text(f"{leader.pid} {leader.started_ticks} {boot_id}", "utf-8")


def _read_leader(folder: Path) -> ProcessId | None:
    """The first process that another server started; None if the file is missing or of an earlier boot."""
    try:
        pid, started_ticks, boot_id = (folder / LEADER_FILE).read_text("utf-8").split()
        leader = ProcessId(int(pid), int(started_ticks))
        return leader if boot_id == _BOOT_ID.read_text("utf-8").strip() else None
    except (OSError, ValueError):
        return None


def _retry_with_permissions(function: Callable[..., Any], path: str, error: object) -> None:
    """Give this user access to a path that could not be removed, and try once more."""
    with suppress(OSError):
        for folder in (Path(path).parent, Path(path)):
            if not folder.is_symlink():
                folder.chmod(0o700)
        function(path)


class LocalSandbox:
    """See `base.Sandbox`. `put` and `get` accept only folders at or below its root."""

    image_digest = None

    def __init__(
        self,
        spec: SandboxSpec,
        resources: LocalResources,
        signaller: ProcessSignaller,
        *,
        paused: bool = False,
    ) -> None:
        assert resources.process is not None
        self.spec = spec
        self.root = PurePosixPath(resources.folder / "root")
        self._process = resources.process
        self._process_tree = resources.process_tree
        self._signaller = signaller
        self._threads = CapacityLimiter(4)
        self._closed = False
        self._paused = paused
        self._ended_stream = EndedStream() if paused else None

    @property
    def stream(self) -> ByteStream:
        return self._ended_stream or self._process.stream

    async def reopen(self) -> None:
        self._check_open()
        if self._paused:
            raise SandboxLostError("the sandbox is paused")
        await self._process.reopen()

    @property
    def log_tail(self) -> str:
        if not self._closed:
            self._process.read_log()
        return str(self._process.log_tail)

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

    async def pause(self) -> None:
        self._check_open()
        if self._process.ended.is_set():
            raise SandboxLostError("the sandbox's first process has ended")
        self._paused = True
        if not await self._signaller.stop(self._process_tree):
            _log.warning("Processes of a local sandbox did not stop", extra=fields(sandbox=self.spec.name))

    async def cause_of_end(self) -> str | None:
        if self._process.stream.ended.is_set():
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._process.ended.wait()
        code = self._process.exit_code
        return None if code is None else f"exit code {code}"

    async def is_running(self) -> bool:
        return not (self._closed or self._paused or self._process.ended.is_set())

    def mark_closed(self) -> None:
        """From now on, methods raise SandboxLostError."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")

    def _host_path(self, folder: PurePosixPath) -> Path:
        self._check_open()
        if not folder.is_relative_to(self.root) or ".." in folder.parts:
            raise BadRequestError(f"{folder} is not below the sandbox's root, {self.root}")
        return Path(folder)
