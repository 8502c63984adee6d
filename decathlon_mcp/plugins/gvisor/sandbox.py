"""One sandbox of gVisor. Programs that runsc starts inside of it reach its files."""

from __future__ import annotations

import logging
import os
import secrets
import select
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

import anyio
from anyio import to_thread

from decathlon_mcp.archives import packing
from decathlon_mcp.archives.unpacking import with_owner
from decathlon_mcp.archives.writing import ArchiveSource, save
from decathlon_mcp.errors import (
    BadRequestError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
    SnapshotError,
)
from decathlon_mcp.plugins.gvisor import saving
from decathlon_mcp.plugins.gvisor.command import CONTAINER, SAVED, inner_command, inside_command
from decathlon_mcp.plugins.gvisor.inside import FAILED, FULL, STOP_SECONDS, STOPPED
from decathlon_mcp.plugins.gvisor.resources import OVERHEAD_MIB, GvisorResources, close_program
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.bubblewrap.image_folder import ImageFolder
from decathlon_mcp.sandboxes.bubblewrap.mounts import DEFAULT_MEMORY_MIB, writable_folders
from decathlon_mcp.sandboxes.bubblewrap.resources import as_user, user_of
from decathlon_mcp.sandboxes.bubblewrap.sandbox import BubblewrapSandbox, files_do_not_fit
from decathlon_mcp.sandboxes.processes.signals import SIGNAL_SECONDS, ProcessSignaller
from decathlon_mcp.sandboxes.snapshots import Snapshot
from decathlon_mcp.telemetry.logs import fields

PAUSED_SECONDS = 300.0
"""How long a paused sandbox waits for another server, from the death of its own: by default as long as any
other. After that its driver decides, which waits longer if `--survive-seconds` is longer."""
SAVE_SECONDS = 120.0
"""How long saving may take: the memory of a sandbox has some gigabytes at most."""
_READ = ("CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH")
_CHUNK_BYTES = 1 << 16
_ERROR_BYTES = 4096

_log = logging.getLogger(__name__)


class GvisorSandbox(BubblewrapSandbox):
    """See `base.Sandbox` and `BubblewrapSandbox`."""

    def __init__(
        self,
        spec: SandboxSpec,
        resources: GvisorResources,
        signaller: ProcessSignaller,
        image: ImageFolder,
        *,
        version: Callable[[], str],
        paused: bool = False,
    ) -> None:
        """`version`: of runsc; blocks."""
        super().__init__(
            spec,
            resources,
            signaller,
            folders=writable_folders(image, spec.root, spec.limits),
            image_digest=image.digest,
            user=user_of(image),
            paused=paused,
        )
        self._files = resources
        self._image = image
        self._version = version

    def _unpack(self, folder: PurePosixPath, below: PurePosixPath, archive: ArchiveSource) -> None:
        user = self._image.user
        with self._program("unpack", str(folder)) as program:
            program.send(with_owner(archive, user.user, user.group))
            if (code := program.finish()) == FULL:
                raise files_do_not_fit(folder)
            if code == FAILED:
                raise BadRequestError(f"cannot unpack into {folder}: {program.reason}")
            self._check(code)

    def _pack(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        limits = str(packing.MAX_ENTRIES), str(packing.MAX_NAME_BYTES)
        with self._program("pack", str(folder), *limits, capabilities=_READ) as program:
            save(program.received(), archive, limit_bytes)
            if (code := program.finish()) == FAILED:
                raise LimitExceededError(f"cannot copy {folder}: {program.reason}", budget="files")
            self._check(code)

    async def give_home(self) -> None:
        """Give the image's user what the image has in that user's home: it belongs to root inside."""
        user = self._image.user
        arguments = ("own", str(user.home), str(user.user), str(user.group))
        await self._run(lambda: self._run_as_root(arguments, ("CAP_CHOWN", *_READ)))

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
        new = self._files.saved_folder / secrets.token_hex(8)
        try:
            await to_thread.run_sync(self._create_saved, new)
            await self._save(new)

            def finish() -> Snapshot:
                saving.describe(new, self.spec, self._image, self._version())
                return saving.move(new, folder)

            return await to_thread.run_sync(finish, limiter=self._threads)
        except OSError as error:
            raise SnapshotError(f"the sandbox cannot be saved: {error.strerror}") from None
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _create_saved(self, folder: Path) -> None:
        folder.mkdir(0o700, parents=True)
        if (user := user_of(self._image)) is not None:
            os.chown(folder, *user)

    async def _save(self, folder: Path) -> None:
        """Let runsc save the sandbox in a folder. Raises SnapshotError, SandboxLostError."""
        user = user_of(self._image)
        with self._files.namespaces() as namespaces, ExitStack() as stack:
            descriptors = [descriptor for _, descriptor in namespaces]
            path = f"{SAVED}/{folder.name}"
            if user is not None:
                # That user cannot enter the folders above it, also not from it. To a server's own user, for
                # what leaves gVisor's kernel, a descriptor would lead to all other files.
                descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
                stack.callback(os.close, descriptors[-1])
                path = f"/proc/self/fd/{descriptors[-1]}"
            options = (f"--image-path={path}", *saving.SAVE_OPTIONS)
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
                with self._files.namespaces():
                    reason = result.stderr[-_ERROR_BYTES:].decode("utf-8", "replace").strip()
                    _log.warning(
                        "A sandbox could not be saved", extra=fields(sandbox=self.spec.name, why=reason)
                    )
                    raise SnapshotError("the sandbox cannot be saved; the server's log has the reason")
        raise SnapshotError(f"the sandbox could not be saved within {SAVE_SECONDS:g} s")

    async def _stop_processes(self) -> bool:
        self._files.mark_paused()
        return await to_thread.run_sync(self._stop, limiter=self._threads, abandon_on_cancel=True)

    def _stop(self) -> bool:
        """Stop all processes; whether they have. Raises SandboxLostError. Blocks.

        The program that stops them goes on until the sandbox is removed.
        """
        if self._files.stopper is not None:
            return True
        popen = self._files.stopper = self._start(("stop", str(PAUSED_SECONDS)), ("CAP_KILL",), as_root=True)
        assert popen.stdout is not None
        poll = select.poll()
        poll.register(popen.stdout, select.POLLIN)
        # Its own time limit, and time to start.
        if poll.poll((STOP_SECONDS + SIGNAL_SECONDS) * 1e3) and popen.stdout.readline().strip() == STOPPED:
            return True
        with self._files.namespaces():
            return False

    def _run_as_root(self, arguments: Sequence[str], capabilities: Sequence[str]) -> None:
        with self._program(*arguments, capabilities=capabilities, as_root=True) as program:
            self._check(program.finish())

    def _check(self, exit_code: int) -> None:
        """Raises SandboxLostError, ProviderUnavailableError unless the exit code of a program is 0."""
        if exit_code == 0:
            return
        with self._files.namespaces():
            raise ProviderUnavailableError(f"a program in the sandbox ended with exit code {exit_code}")

    @contextmanager
    def _program(
        self, *arguments: str, capabilities: Sequence[str] = (), as_root: bool = False
    ) -> Generator[_Program]:
        """`inside.py`, run in the sandbox; ended when this is exited. Blocks.

        Raises SandboxLostError, ProviderUnavailableError.
        """
        popen = self._start(arguments, capabilities, as_root=as_root)
        try:
            yield _Program(popen)
        finally:
            # What runs inside ends with its streams.
            popen.kill()
            close_program(popen)

    def _start(
        self, arguments: Sequence[str], capabilities: Sequence[str], *, as_root: bool
    ) -> subprocess.Popen[bytes]:
        user = self._image.user
        options = ["--cwd=/", "--user=0:0" if as_root else f"--user={user.user}:{user.group}"]
        options += [f"--cap={name}" for name in capabilities]
        program = inside_command(self._image, *arguments)
        with self._files.namespaces() as namespaces:
            command = inner_command(namespaces, "exec", *options, CONTAINER, *program)
            return subprocess.Popen(
                [*as_user(user_of(self._image)), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={},
                pass_fds=[descriptor for _, descriptor in namespaces],
                start_new_session=True,
            )


class _Program:
    """A run of `inside.py` in a sandbox. Its methods block. `reason`: what it wrote to stderr at its end."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._popen = popen
        self._stdin, self._stdout, self._stderr = popen.stdin, popen.stdout, popen.stderr
        self.reason = ""

    def send(self, chunks: Iterable[bytes]) -> None:
        # It does not read on after an error.
        with suppress(BrokenPipeError):
            for chunk in chunks:
                self._stdin.write(chunk)

    def received(self) -> Iterator[bytes]:
        """What it writes to stdout."""
        while chunk := self._stdout.read(_CHUNK_BYTES):
            yield chunk

    def finish(self) -> int:
        """Wait until it ends; returns its exit code."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        self.reason = self._stderr.read(_ERROR_BYTES).decode("utf-8", "replace").strip()
        return self._popen.wait()
