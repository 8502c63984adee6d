"""Opens local sandboxes in namespaces: this machine's programs, and nothing else of it.

Every sandbox has the suite's root at the same path, so that a task's prompt is the same in every episode.
`host_files` lists what a sandbox can read; the suite's root, a home, /tmp, /run and /var/tmp are file systems
in memory. The network has a loopback interface and nothing else, unless the task needs more: then it leads
to other machines too, and to nothing else of this one (`network`). Where that is not possible, it is this
machine's own.

Decided 2026-11-22: `why_unavailable` opens no sandbox of the provider but runs bubblewrap once with the same
command line. The answer is needed before there is a provider, by the list of tasks.

Decided 2026-11-27: only what the kernel refuses, or a program that is missing, means that this machine cannot
isolate. Everything else (a time-out, no memory, no process, no descriptor, a signal) is a failed look, which
is repeated and then an error. A machine that is busy when a server starts isolates a second later.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Self

from anyio import to_thread

from decathlon_mcp.errors import DecathlonError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import (
    PYTHON_CHECK,
    Finding,
    Limits,
    SandboxSpec,
    check_python,
    limited_check,
)
from decathlon_mcp.sandboxes.bubblewrap.command import SandboxFiles, bubblewrap_command
from decathlon_mcp.sandboxes.bubblewrap.host_files import HostFiles
from decathlon_mcp.sandboxes.bubblewrap.mount_view import view_launcher
from decathlon_mcp.sandboxes.bubblewrap.mounts import file_with
from decathlon_mcp.sandboxes.bubblewrap.namespace_provider import (
    ALLOW,
    INSTALL,
    PROBE_SECONDS,
    NamespaceProvider,
    find_program,
    lacks_namespaces,
    message_with_notes,
    program_version,
)
from decathlon_mcp.sandboxes.bubblewrap.network import PROGRAM, OwnNetwork
from decathlon_mcp.sandboxes.bubblewrap.resources import STATUS_BYTES, Host, as_user, read_status, user_of
from decathlon_mcp.sandboxes.bubblewrap.seccomp import compile_filter
from decathlon_mcp.sandboxes.local import LOCAL, LocalEnvironment, check_folder
from decathlon_mcp.sandboxes.processes.resources import closing_descriptor
from decathlon_mcp.sandboxes.processes.table import ProcessId

PLAIN = "--isolation none runs sandboxes as ordinary processes, without isolation"
PROBE_ATTEMPTS = 3
PROBE_PAUSE_SECONDS = 1.0
"""How often the machine is asked what it allows, until it answers, and the pause between two tries."""
_MESSAGE_CHARACTERS = 500
_REFUSALS = (
    *(errno.EPERM, errno.EACCES, errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP),
    errno.EROFS,
)
"""What a kernel or a container that does not allow a sandbox answers, at every try."""
_USER_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")


class HostProvider(NamespaceProvider):
    """The local provider where the machine allows namespaces. `hidden`: see `HostFiles`.

    `why_shared`: why sandboxes with a network share this machine's; None if they have one of their own.
    """

    name = LOCAL

    def __init__(
        self, owner: str, folder: Path, *, hidden: Collection[Path] = (), why_shared: str | None = None
    ) -> None:
        super().__init__(owner, folder)
        self._hidden = tuple(hidden)
        self._files_with_network: HostFiles | None = None
        self._why_shared = why_shared
        self._environment = LocalEnvironment()

    async def __aenter__(self) -> Self:
        # A search of all files that sandboxes can read, for up to seconds: not in the event loop.
        await to_thread.run_sync(lambda: self._files_alone)
        return await super().__aenter__()

    async def environment(self, image: str | None) -> str | None:
        identity = await self._environment.identity()
        # Other programs are found than without isolation.
        return identity and f"{identity}.namespaces"

    def _files(self, spec: SandboxSpec) -> HostFiles:
        if spec.network == "none":
            return self._files_alone
        if self._files_with_network is None:
            network = self._find_host().network
            self._files_with_network = self._files_alone.with_network(network and network.nameserver)
        return self._files_with_network

    @cached_property
    def _files_alone(self) -> HostFiles:
        return HostFiles.of_this_server(self._hidden)

    def _find_host(self) -> Host:
        if self._host is None:
            launcher = view_launcher(HostFiles.of_this_server().reached)
            network = OwnNetwork.of_this_machine() if self._why_shared is None else None
            self._host = Host(find_program(), self._hierarchies, launcher, network)
        return self._host

    async def check(self, image: str | None) -> list[Finding]:
        isolation = "namespaces: sandboxes see this machine's programs and nothing else of it"
        findings = [Finding("isolation", True, isolation), self._check_network()]
        with limited_check(findings):
            try:
                findings += await to_thread.run_sync(self._check_machine, abandon_on_cancel=True)
                findings += await to_thread.run_sync(check_folder, self._folder, abandon_on_cancel=True)
                cure = "run the server with a complete Python 3.10 or later"
                if all(result.ok for result in findings):
                    findings.append(await check_python(self.open, image, cure))
            except DecathlonError as error:
                message = message_with_notes(error)
                findings.append(Finding("sandbox", False, message, f"{_cure_of(message)}; {PLAIN}"))
            except OSError as error:
                cure = "choose a writable folder with free space (--state)"
                findings.append(Finding("sandbox", False, f"none could be created: {error}", cure))
        return findings

    def _check_network(self) -> Finding:
        if self._why_shared is not None:
            detail = f"sandboxes of tasks that need a network share that of this machine: {self._why_shared}"
            return Finding("network", True, detail)
        return Finding(
            "network", True, f"{shutil.which(PROGRAM)}: leads to other machines and not to this one"
        )


@cache
def why_no_own_network() -> str | None:
    """Why local sandboxes cannot have a network of their own here, and what to do; None if they can.

    Raises ProviderUnavailableError if that could not be found out.
    """

    def look() -> None:
        OwnNetwork.of_this_machine()

    return _asked(look, "a network of their own")


@cache
def why_unavailable() -> str | None:
    """Why local sandboxes cannot have namespaces on this machine, and what to do; None if they can.

    Runs bubblewrap once, for some 50 ms. Raises ProviderUnavailableError if that could not be found out.
    """
    return _asked(_probe, "namespaces")


def _asked(look: Callable[[], str | None], what: str) -> str | None:
    """The answer of `look`, which is tried again if it failed for a reason that passes."""
    reason = ""
    for attempt in range(PROBE_ATTEMPTS):
        if attempt:
            time.sleep(PROBE_PAUSE_SECONDS)
        try:
            return look()
        except ProviderUnavailableError as error:
            cause = error.__cause__
            if cause is None or _is_refusal(cause):
                return error.message
            reason = error.message
        except subprocess.TimeoutExpired as error:
            reason = f"{Path(error.cmd[0]).name} did not end within {error.timeout:g} s"
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: no new thread
            if _is_refusal(error):
                return f"bubblewrap cannot be run: {error}"
            reason = str(error)
    raise ProviderUnavailableError(
        f"whether local sandboxes can have {what} here could not be found out in {PROBE_ATTEMPTS} tries: "
        f"{reason}; try again"
    )


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _REFUSALS


def _refuses(message: str) -> bool:
    """Whether bubblewrap failed with this message because of what this machine is, and not of its load."""
    # In bubblewrap's own words, without that of the error, where it explains EPERM and EINVAL.
    words = ("No permissions to create", "does not support user namespaces")
    if any(text in message for text in (*words, *map(os.strerror, _REFUSALS))):
        return True
    try:
        # With ENOSPC, the kernel says that there are too many of them.
        return lacks_namespaces(message) and int(_USER_NAMESPACES.read_text("ascii")) == 0
    except (OSError, ValueError):
        return False


def _probe() -> str | None:
    program = find_program()
    version, is_recent = program_version(program)
    if not is_recent:
        return f"{version} is too old: {INSTALL}"
    spec = SandboxSpec("probe", PYTHON_CHECK, PurePosixPath("/decathlon"), limits=Limits(memory_mib=256))
    with isolated_command(spec, HostFiles.of_this_server()) as command:
        result = subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=PROBE_SECONDS,
            pass_fds=command.descriptors,
            check=False,
        )
    if result.returncode == 0:
        return None
    message = " ".join(result.stderr.decode("utf-8", "replace").split())[-_MESSAGE_CHARACTERS:]
    reason = f"bubblewrap created no sandbox: {message or f'exit code {result.returncode}'}"
    if not _refuses(message):
        raise subprocess.SubprocessError(reason)
    return f"{reason}; {_cure_of(message)}"


@dataclass(frozen=True, slots=True)
class IsolatedCommand:
    """A command line that runs one command in namespaces, and descriptors that it must inherit.

    `launcher`: the beginning of it, which executes the rest as the command's user on this machine.
    """

    launcher: list[str]
    argv: list[str]
    descriptors: tuple[int, ...]
    _status: int

    @property
    def first_process(self) -> ProcessId:
        """The command's process, once it runs. Raises SandboxLostError."""
        pid = read_status(os.pread(self._status, STATUS_BYTES, 0)).get("child-pid")
        found = ProcessId.of(pid) if isinstance(pid, int) else None
        if found is None:
            raise SandboxLostError("the command in namespaces has ended")
        return found


@contextmanager
def isolated_command(spec: SandboxSpec, files: HostFiles) -> Generator[IsolatedCommand]:
    """The command line for one command, which ends with the process that starts it.

    Its memory, CPUs and processes have no limit. Raises ProviderUnavailableError.
    """
    with ExitStack() as stack:
        status = stack.enter_context(closing_descriptor(os.memfd_create("status", os.MFD_CLOEXEC)))
        block, ours = socket.socketpair()
        stack.enter_context(block)
        stack.enter_context(ours).send(b"1")
        seccomp = stack.enter_context(closing_descriptor(file_with(compile_filter())))
        opened = SandboxFiles(status, block.fileno(), seccomp)
        arguments, descriptors = bubblewrap_command(find_program(), spec, files, opened, stack)
        launcher = [*view_launcher(files.reached), *as_user(user_of(files))]
        yield IsolatedCommand(launcher, [*launcher, *arguments], (*opened.descriptors, *descriptors), status)


def _cure_of(message: str) -> str:
    if lacks_namespaces(message):
        return ALLOW
    if "ermission denied" in message:
        return "the folder of the server's Python must be accessible to other users"
    return "bubblewrap needs more than this machine allows, as in most containers"
