"""What one sandbox of gVisor occupies on this machine: see `bubblewrap.resources`.

The leader is `runsc run`, whose exit code is that of the first process inside.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

from decathlon_sandbox import wire

from decathlon_mcp.archives.folder_cursor import FolderCursor
from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.plugins.gvisor.command import STATE_FILE, outer_command
from decathlon_mcp.plugins.gvisor.inside import NOT_STARTED
from decathlon_mcp.plugins.gvisor.saving import open_files
from decathlon_mcp.sandboxes.base import KILLED_INSIDE, OUT_OF_MEMORY, Limits, SandboxSpec
from decathlon_mcp.sandboxes.bubblewrap.cgroups import Hierarchies
from decathlon_mcp.sandboxes.bubblewrap.image_folder import ImageFolder
from decathlon_mcp.sandboxes.bubblewrap.mounts import RootFiles
from decathlon_mcp.sandboxes.bubblewrap.resources import BubblewrapResources, Host, user_of
from decathlon_mcp.sandboxes.processes.resources import closing_descriptor
from decathlon_mcp.sandboxes.processes.table import ProcessId
from decathlon_mcp.sandboxes.snapshots import Snapshot
from decathlon_mcp.storage.disk import open_regular

LOG_FILE = "runsc"
"""In a sandbox's folder: what `runsc run` notes, about 2 KiB."""
SAVED_FOLDER = "saved"
PAUSED_FILE = "paused"
"""In a sandbox's folder, once it is to be paused."""
OVERHEAD_MIB = 512
"""Memory of gVisor's kernel (25 MiB in a small sandbox), and what a sandbox may fill above its limit until
the driver has noticed it."""
HOST_THREADS, MORE_THREADS = 8, 256
"""Threads on this machine for each process inside, and for gVisor's own: a limit that only a fault reaches,
since gVisor counts the processes inside itself."""
_NAMESPACES = (("user", "user"), ("mount", "mnt"), ("pid", "pid"))
_ENDED = re.compile(rb"Exiting with status: (\d+)\n")
_LOG_BYTES = 4096
_STATE_BYTES = 1 << 20
"""Limit on the file; the sandbox's configuration is in it."""


class GvisorResources(BubblewrapResources):
    """`runsc`: the program; only to start a sandbox. `stopper`: what has stopped its processes. `snapshot`:
    what it is restored from, if it is.
    """

    runsc: Path | None = None
    stopper: subprocess.Popen[bytes] | None = None
    snapshot: Snapshot | None = None

    def _command(
        self, spec: SandboxSpec, root: RootFiles, host: Host, stack: ExitStack
    ) -> tuple[Sequence[str], tuple[int, ...]]:
        assert self.runsc is not None
        assert isinstance(root, ImageFolder)
        status, log = self._new_file("status", stack), self._new_file(LOG_FILE, stack)
        own, started = os.pipe()
        stack.callback(os.close, started)
        self._set_up = FileIO(own)
        saved = None
        if (user := user_of(root)) is None:
            saved = self.saved_folder
            saved.mkdir(mode=0o700)
        else:
            # runsc opens both again, as that user.
            os.fchown(log, *user)
            os.fchown(started, *user)
        command, descriptors = outer_command(
            host.program,
            self.runsc,
            spec,
            root,
            stack,
            status=status,
            started=started,
            log=log,
            saved=saved,
            snapshot=() if self.snapshot is None else open_files(self.snapshot, stack),
        )
        return command, (status, started, log, *descriptors)

    def _group_limits(self, limits: Limits) -> Limits:
        memory, pids = limits.memory_mib, limits.pids
        return replace(
            limits,
            memory_mib=None if memory is None else memory + OVERHEAD_MIB,
            pids=None if pids is None else HOST_THREADS * pids + MORE_THREADS,
        )

    def _limit_processes(self, spec: SandboxSpec, leader: ProcessId, hierarchies: Hierarchies) -> None:
        pass  # gVisor counts those inside

    @property
    def saved_folder(self) -> Path:
        """In the sandbox's folder: what runsc saves, until it has its place."""
        return self.folder / SAVED_FOLDER

    @property
    def has_started(self) -> bool:
        """Whether the first process inside was started, by what runsc keeps as the sandbox's state.

        Also if it has ended.
        """
        try:
            with closing_descriptor(self.open_root()) as root, FolderCursor(root) as cursor:
                *folders, name = STATE_FILE.split("/")
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                folder = cursor.enter(tuple(folders))
                with closing_descriptor(os.open(name, flags, dir_fd=folder)) as file:
                    return b'"status":"running"' in os.read(file, _STATE_BYTES)
        except SandboxLostError:
            return True
        except OSError:
            return False

    @contextmanager
    def namespaces(self) -> Generator[list[tuple[str, int]]]:
        """Kind and descriptor of each of runsc's namespaces, to be entered in this order.

        Raises SandboxLostError if the first process has ended.
        """
        leader = self.leader
        with ExitStack() as stack:
            found: list[tuple[str, int]] = []
            if leader is not None:
                with suppress(OSError):
                    for kind, name in _NAMESPACES:
                        file = os.open(f"/proc/{leader.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
                        stack.callback(os.close, file)
                        found.append((kind, file))
            # Looked at after the files are open: the number may belong to another process by now.
            if leader is None or ProcessId.of(leader.pid) != leader:
                raise SandboxLostError("the sandbox's first process has ended")
            yield found

    def release(self) -> bool:
        if self.stopper is not None:
            self.stopper.kill()
            close_program(self.stopper)
        return super().release()

    @property
    def is_paused(self) -> bool:
        return (self.folder / PAUSED_FILE).exists()

    def mark_paused(self) -> None:
        (self.folder / PAUSED_FILE).touch()

    @property
    def has_run(self) -> bool:
        return self._wait_status is not None

    def cause_of_end(self, exit_code: int | None = None) -> str | None:
        status = self._wait_status
        code = None if status is None else os.waitstatus_to_exitcode(status)
        if code == wire.OUT_OF_MEMORY_EXIT or (code != 0 and self.group.was_out_of_memory):
            # The machine's kernel may have killed what gVisor needs for one process only.
            return OUT_OF_MEMORY
        if code is None:
            # runsc was killed, or gVisor's kernel has ended without the first process.
            cause = super().cause_of_end(exit_code)
            return None if cause == f"exit code {NOT_STARTED}" else cause
        if code < 0:
            # Nobody outside sends signals to a process inside, and gVisor, unlike Linux, lets a first process
            # be killed by others inside.
            return KILLED_INSIDE
        return None if code == NOT_STARTED else f"exit code {code}"

    @property
    def _wait_status(self) -> int | None:
        """How the first process inside has ended, see wait(2); None if runsc did not note it."""
        with suppress(OSError), open_regular(self.folder / LOG_FILE) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            if found := _ENDED.search(log.read(_LOG_BYTES)):
                return int(found[1])
        return None


def close_program(popen: subprocess.Popen[bytes]) -> None:
    """Close the streams of a program that ends by itself, and wait for its end."""
    for stream in (popen.stdin, popen.stdout, popen.stderr):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()
    popen.wait()
