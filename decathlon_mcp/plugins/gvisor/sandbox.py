"""The kernel `gvisor` of the provider `host`: a kernel of its own in user space for each sandbox.

runsc runs in namespaces that bubblewrap creates (`command`), without a daemon and without being root. The
files are an unpacked image's: read-only but for the suite's root, the home of the image's user, /tmp, /run
and /var/tmp, which are in the memory of gVisor's kernel. Archives are packed and unpacked by programs that
runsc starts in the sandbox (`inside.py`), from the image's own Python.

gVisor counts processes itself. It has no limit of memory: the driver keeps one (`decathlon_sandbox.memory`),
and the control group has a higher limit. A first process that is no driver has only the control group's.

Decided 2026-11-26: no `runsc --rootless`, which can save a sandbox but not restore it, and no outbound
network.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path, PurePosixPath

import anyio
from anyio import to_thread
from decathlon_sandbox import wire

from decathlon_mcp.archives import packing
from decathlon_mcp.archives.packing import FolderCursor
from decathlon_mcp.archives.unpacking import with_owner
from decathlon_mcp.archives.writing import ArchiveSource, save
from decathlon_mcp.errors import (
    BadRequestError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.plugins.gvisor.inside import FAILED, FULL, NOT_STARTED, STOP_SECONDS, STOPPED
from decathlon_mcp.plugins.gvisor.runsc import (
    CONTAINER,
    ERROR_BYTES,
    INSTALL_RUNSC,
    SAVE_OPTIONS,
    SAVED,
    STATE_FILE,
    Program,
    check_snapshot,
    describe_snapshot,
    find_runsc,
    inner_command,
    inside_command,
    late_timers,
    move_snapshot,
    open_snapshot,
    outer_command,
    runsc_version,
)
from decathlon_mcp.sandboxes.base import KILLED_INSIDE, OUT_OF_MEMORY, Finding, LimitName, Limits, finding
from decathlon_mcp.sandboxes.capabilities import Snapshot
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from decathlon_mcp.sandboxes.host.command import as_user
from decathlon_mcp.sandboxes.host.image_folder import ImageFolder
from decathlon_mcp.sandboxes.host.mounts import DEFAULT_MEMORY_MIB
from decathlon_mcp.sandboxes.host.namespaces import (
    SET_UP_SECONDS,
    STATUS_FILE,
    NamespaceSandbox,
    files_do_not_fit,
)
from decathlon_mcp.sandboxes.host.processes import SIGNAL_SECONDS, ProcessId
from decathlon_mcp.sandboxes.host.sandbox_folder import closing_descriptor
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.telemetry.logs import fields

POLL_SECONDS = 0.005
"""Between two looks at a sandbox that starts, which takes gVisor some 20 ms once its kernel runs."""
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
PAUSED_SECONDS = 300.0
"""How long a paused sandbox waits for another server, from the death of its own: by default as long as any
other. After that its driver decides, which waits longer if `--survive-seconds` is longer."""
SAVE_SECONDS = 120.0
"""How long saving may take: the memory of a sandbox has some gigabytes at most."""
_READ = ("CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH")

_log = logging.getLogger(__name__)


class GvisorSandbox(NamespaceSandbox):
    """See `NamespaceSandbox`. The first process on this machine is `runsc run`.

    Its exit code is the exit code of the first process inside.
    """

    kernel = "gvisor"
    can_be_saved = True
    _stopper: Program | None = None
    """The program inside that has stopped its processes."""
    _snapshot: Snapshot | None = None
    """The snapshot that it is restored from, if any."""

    @classmethod
    def unlimited(cls, hierarchies: Hierarchies) -> tuple[LimitName, ...]:
        # The driver limits the memory without control groups too.
        return tuple(name for name in hierarchies.unlimited if name == "cpus")

    @classmethod
    def check_machine(cls) -> list[Finding]:
        runsc = find_runsc()
        version, is_recent = runsc_version(runsc)
        return [finding("runsc", is_recent, f"{version} at {runsc}", INSTALL_RUNSC)]

    @property
    def _image(self) -> ImageFolder:
        assert isinstance(self.files, ImageFolder)
        return self.files

    def restore(self, snapshot: Snapshot) -> None:
        check_snapshot(snapshot, self.spec, self._image, runsc_version(find_runsc())[0])
        self._snapshot = snapshot

    def start(self) -> None:
        with late_timers():
            super().start()

    def _command(self, stack: ExitStack) -> tuple[Sequence[str], tuple[int, ...]]:
        status, log = self._new_file(STATUS_FILE, stack), self._new_file(LOG_FILE, stack)
        own, started = os.pipe()
        stack.callback(os.close, started)
        self._set_up = FileIO(own)
        saved = None
        if (user := self._user) is None:
            saved = self.folder / SAVED_FOLDER
            saved.mkdir(mode=0o700)
        else:
            # runsc opens both again, as that user.
            os.fchown(log, *user)
            os.fchown(started, *user)
        command, descriptors = outer_command(
            self._machine.program,
            find_runsc(),
            self.spec,
            self._image,
            stack,
            status=status,
            started=started,
            log=log,
            saved=saved,
            snapshot=() if self._snapshot is None else open_snapshot(self._snapshot, stack),
        )
        return command, (status, started, log, *descriptors)

    def _group_limits(self, limits: Limits) -> Limits:
        memory, pids = limits.memory_mib, limits.pids
        return replace(
            limits,
            memory_mib=None if memory is None else memory + OVERHEAD_MIB,
            pids=None if pids is None else HOST_THREADS * pids + MORE_THREADS,
        )

    def _limit_processes(self, leader: ProcessId) -> None:
        pass  # gVisor counts processes inside

    async def wait_until_open(self) -> None:
        try:
            await self._wait_until_started()
        except ProviderUnavailableError as error:
            if self._snapshot is None:
                raise
            raise _not_restored(error) from None
        if self._snapshot is None and self._image.user.user:
            await self._give_home()

    async def _wait_until_started(self) -> None:
        await self._wait_until_set_up()
        with anyio.move_on_after(SET_UP_SECONDS):
            while not self.has_started:  # noqa: ASYNC110  (nothing reports it)
                await anyio.sleep(POLL_SECONDS)
        if self._snapshot is not None:
            # What is wrong with a snapshot may be seen late. If the sandbox has ended, this says why.
            with suppress(SandboxLostError):
                os.close(self.open_root())
                return
            await self._wait_until_set_up()

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
    def _namespaces(self) -> Generator[list[tuple[str, int]]]:
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

    def _release(self) -> bool:
        if self._stopper is not None:
            self._stopper.close()
        return super()._release()

    def _was_paused(self) -> bool:
        return (self.folder / PAUSED_FILE).exists()

    @property
    def has_run(self) -> bool:
        return self._wait_status is not None

    def _cause_of_end(self, exit_code: int | None) -> str | None:
        status = self._wait_status
        code = None if status is None else os.waitstatus_to_exitcode(status)
        if code == wire.OUT_OF_MEMORY_EXIT or (code != 0 and self.group.was_out_of_memory):
            # The machine's kernel may have killed what gVisor needs for one process only.
            return OUT_OF_MEMORY
        if code is None:
            # runsc was killed, or gVisor's kernel has ended without the first process.
            cause = super()._cause_of_end(exit_code)
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

    def _unpack(self, folder: PurePosixPath, below: PurePosixPath, archive: ArchiveSource) -> None:
        user = self._image.user
        with closing(self._start_program("unpack", str(folder))) as program:
            program.send(with_owner(archive, user.user, user.group))
            if (code := program.finish()) == FULL:
                raise files_do_not_fit(folder)
            if code == FAILED:
                raise BadRequestError(f"cannot unpack into {folder}: {program.reason}")
            self._check_exit(code)

    def _pack(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        limits = str(packing.MAX_ENTRIES), str(packing.MAX_NAME_BYTES)
        with closing(self._start_program("pack", str(folder), *limits, capabilities=_READ)) as program:
            save(program.received(), archive, limit_bytes)
            if (code := program.finish()) == FAILED:
                raise LimitExceededError(f"cannot copy {folder}: {program.reason}", budget="files")
            self._check_exit(code)

    async def _give_home(self) -> None:
        """Give the image's user what the image has in that user's home: it belongs to root inside."""
        user = self._image.user
        arguments = ("own", str(user.home), str(user.user), str(user.group))

        def give() -> None:
            capabilities = ("CAP_CHOWN", *_READ)
            with closing(self._start_program(*arguments, capabilities=capabilities, as_root=True)) as program:
                self._check_exit(program.finish())

        await self._run(give)

    @property
    def max_snapshot_bytes(self) -> int:
        """See `SavedSandbox`: what its processes and files may take of the memory, with gVisor's own."""
        return ((self.spec.limits.memory_mib or DEFAULT_MEMORY_MIB) + OVERHEAD_MIB) << 20

    async def snapshot(self, folder: Path) -> Snapshot:
        """See `SavedSandbox`."""
        self._check_open()
        if self._paused:
            raise SandboxLostError("the sandbox is paused")
        # Below the sandbox's folder, which is removed with the sandbox, also by another server.
        new = self.folder / SAVED_FOLDER / secrets.token_hex(8)
        try:
            await to_thread.run_sync(self._create_saved, new)
            await self._save(new)

            def finish() -> Snapshot:
                describe_snapshot(new, self.spec, self._image, runsc_version(find_runsc())[0])
                return move_snapshot(new, folder)

            return await to_thread.run_sync(finish, limiter=self._threads)
        except OSError as error:
            raise SnapshotError(f"the sandbox cannot be saved: {error.strerror}") from None
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _create_saved(self, folder: Path) -> None:
        folder.mkdir(0o700, parents=True)
        if (user := self._user) is not None:
            os.chown(folder, *user)

    async def _save(self, folder: Path) -> None:
        """Let runsc save the sandbox in a folder. Raises SnapshotError, SandboxLostError."""
        user = self._user
        with self._namespaces() as namespaces, ExitStack() as stack:
            descriptors = [descriptor for _, descriptor in namespaces]
            path = f"{SAVED}/{folder.name}"
            if user is not None:
                # That user cannot enter the folders above it, also not from it. To a server's own user, for
                # what leaves gVisor's kernel, a descriptor would lead to all other files.
                descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
                stack.callback(os.close, descriptors[-1])
                path = f"/proc/self/fd/{descriptors[-1]}"
            options = (f"--image-path={path}", *SAVE_OPTIONS)
            command = inner_command(namespaces, "checkpoint", *options, CONTAINER)
            with anyio.move_on_after(SAVE_SECONDS):
                result = await anyio.run_process(
                    [*as_user(user), *command],
                    check=False,
                    cwd="/",
                    env={},
                    pass_fds=descriptors,
                    start_new_session=True,
                )
                if result.returncode == 0:
                    return
                with self._namespaces():
                    reason = result.stderr[-ERROR_BYTES:].decode("utf-8", "replace").strip()
                    _log.warning(
                        "A sandbox could not be saved", extra=fields(sandbox=self.spec.name, why=reason)
                    )
                    raise SnapshotError("the sandbox cannot be saved; the server's log has the reason")
        raise SnapshotError(f"the sandbox could not be saved within {SAVE_SECONDS:g} s")

    async def _stop_processes(self) -> bool:
        (self.folder / PAUSED_FILE).touch()
        return await to_thread.run_sync(self._stop, limiter=self._threads, abandon_on_cancel=True)

    def _stop(self) -> bool:
        """Stop all processes; whether they have. Raises SandboxLostError. Blocks.

        The program that stops them goes on until the sandbox is removed.
        """
        if self._stopper is not None:
            return True
        program = self._stopper = self._start_program(
            "stop", str(PAUSED_SECONDS), capabilities=("CAP_KILL",), as_root=True
        )
        poll = select.poll()
        poll.register(program.stdout, select.POLLIN)
        # Its own time limit, and time to start.
        if poll.poll((STOP_SECONDS + SIGNAL_SECONDS) * 1e3) and program.stdout.readline().strip() == STOPPED:
            return True
        with self._namespaces():
            return False

    def _check_exit(self, exit_code: int) -> None:
        """Raises SandboxLostError, ProviderUnavailableError unless the exit code of a program is 0."""
        if exit_code == 0:
            return
        with self._namespaces():
            raise ProviderUnavailableError(f"a program in the sandbox ended with exit code {exit_code}")

    def _start_program(
        self, *arguments: str, capabilities: Sequence[str] = (), as_root: bool = False
    ) -> Program:
        """Run `inside.py` in the sandbox. Blocks. Raises SandboxLostError."""
        user = self._image.user
        options = ["--cwd=/", "--user=0:0" if as_root else f"--user={user.user}:{user.group}"]
        options += [f"--cap={name}" for name in capabilities]
        program = inside_command(self._image, *arguments)
        with self._namespaces() as namespaces:
            command = inner_command(namespaces, "exec", *options, CONTAINER, *program)
            popen = subprocess.Popen(
                [*as_user(self._user), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={},
                pass_fds=[descriptor for _, descriptor in namespaces],
                start_new_session=True,
            )
            return Program(popen)


def _not_restored(error: ProviderUnavailableError) -> SnapshotError:
    failure = SnapshotError("no sandbox could be opened from the snapshot; the server's log has the reason")
    failure.__notes__ = getattr(error, "__notes__", [])
    return failure
