"""bubblewrap (bwrap(1), version 0.7 or later): the program, what it needs here, and its command line."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from decathlon_mcp.errors import ImageError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.image_folder import SANDBOX_USER, UNPACK, ImageFolder
from decathlon_mcp.sandboxes.host.mounts import (
    CopiedFiles,
    RootFiles,
    WritableFolder,
    memory_mount,
    view_launcher,
    writable_folders,
)
from decathlon_mcp.sandboxes.host.network import OwnNetwork
from decathlon_mcp.sandboxes.host.processes import ProcessId
from decathlon_mcp.sandboxes.host.sandbox_folder import closing_descriptor
from decathlon_mcp.sandboxes.host.seccomp import compile_filter, is_supported
from decathlon_mcp.types import as_object

if TYPE_CHECKING:
    from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox

PROGRAM = "bwrap"
MINIMAL_VERSION = (0, 7)
"""The first with `--size`."""
INSTALL = "install bubblewrap 0.7 or later (apt-get install bubblewrap)"
ALLOW = (
    "allow user namespaces: sysctl -w user.max_user_namespaces=65536 "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that exist)"
)
PROBE_SECONDS = 10.0
"""Limit on programs that take 50 ms."""
STATUS_BYTES = 4096

HOST_NAME = "sandbox"
SHARED_MEMORY_BYTES = 64 << 20
"""Size of /dev/shm, as in a container."""
_VIRTUAL = (PurePosixPath("/proc"), PurePosixPath("/dev"))
_NAMESPACES = ("user", "pid", "ipc", "uts")


@dataclass(frozen=True, slots=True)
class BubblewrapCommand:
    """A command line of bubblewrap for one sandbox, and descriptors that it must inherit.

    `set_up` can be read when the sandbox is set up, or when bubblewrap has ended.
    """

    argv: list[str]
    descriptors: tuple[int, ...]
    set_up: socket.socket


def bubblewrap_command(
    program: str,
    spec: SandboxSpec,
    root: RootFiles,
    status: int,
    stack: ExitStack,
    *,
    shares_network: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> BubblewrapCommand:
    """The command line for one sandbox. `variables`: further variables of the first process.

    bubblewrap writes the first process's number and exit code to `status`. `stack` closes the other
    descriptors that it inherits. `shares_network`: the sandbox has this machine's network, its loopback
    interface included.
    """
    folders = writable_folders(root, spec.root, spec.limits)
    copied = CopiedFiles(stack)
    command = [program, *(f"--unshare-{name}" for name in _NAMESPACES), "--unshare-cgroup-try"]
    if not shares_network:
        command.append("--unshare-net")
    command += ["--uid", str(root.user.user), "--gid", str(root.user.group), "--hostname", HOST_NAME]
    command += ["--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    if not spec.survives:
        command.append("--die-with-parent")
    command += ["--json-status-fd", str(status)]
    command += ["--seccomp", copied.add_content(compile_filter(fixed_addresses=spec.merge_pages))]
    command.append("--clearenv")
    own = {"HOME": str(root.user.home), "HOSTNAME": HOST_NAME}
    for name, value in {**root.environment, **own, **variables}.items():
        command += ["--setenv", name, value]
    command += root.first_mounts([*_VIRTUAL, *(folder.path for folder in folders)], copied)
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    command += memory_mount(WritableFolder(PurePosixPath("/dev/shm"), SHARED_MEMORY_BYTES, 0o1777))
    command += ["--remount-ro", "/dev"]
    for folder in folders:
        command += memory_mount(folder)
        command += root.mounts_in(folder, copied)
    # After everything has been created in it.
    command += ["--remount-ro", "/", "--chdir", str(spec.root)]
    # bubblewrap reads a byte from its end when everything is set up, and closes it.
    ours, block = socket.socketpair()
    stack.callback(block.close)
    ours.setblocking(False)
    ours.send(b"1")
    command += ["--block-fd", str(block.fileno()), "--", *spec.command]
    return BubblewrapCommand(command, (status, block.fileno(), *copied.descriptors), ours)


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


def read_status(content: bytes) -> dict[str, object]:
    """What bubblewrap writes about a sandbox: JSON objects, one a line; a line that is cut is ignored."""
    values: dict[str, object] = {}
    for line in content[:STATUS_BYTES].splitlines():
        with suppress(ValueError):
            values |= as_object(json.loads(line)) or {}
    return values


def find_program() -> str:
    """The path of bwrap. Raises ProviderUnavailableError."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ProviderUnavailableError(f"there is no {PROGRAM} on the PATH: {INSTALL}")
    if not is_supported():
        raise ProviderUnavailableError(f"there is no filter of system calls for {platform.machine()}")
    return program


def program_version(program: str) -> tuple[str, bool]:
    """What bubblewrap says about its version, and whether that is `MINIMAL_VERSION` or later. Blocks.

    Raises OSError, subprocess.SubprocessError.
    """
    output = subprocess.run([program, "--version"], capture_output=True, timeout=PROBE_SECONDS, check=False)
    version = output.stdout.decode("utf-8", "replace").strip()
    return version, tuple(map(int, re.findall(r"\d+", version)[:2])) >= MINIMAL_VERSION


def lacks_namespaces(message: str) -> bool:
    """Whether bubblewrap failed with this message because the kernel refuses user namespaces."""
    # Kernels of some distributions have one of these, and containers of an engine refuse namespaces.
    return any(text in message for text in ("new namespace", "uid map", "RTM_NEWADDR"))


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
        command = bubblewrap_command(find_program(), spec, files, status, stack)
        stack.enter_context(command.set_up)
        launcher = [*view_launcher(files.reached), *as_user(user_of(files))]
        yield IsolatedCommand(launcher, [*launcher, *command.argv], command.descriptors, status)


class Machine:
    """What sandboxes need of this machine, looked for when the first of them needs it.

    `kernel`: the name of their own kernel, with which they need an image. `image`: the folder of the image
    that a spec may name by its digest too. `hidden`: see `HostFiles`. `why_shared`: why sandboxes with a
    network share this machine's; None if they have one of their own.
    """

    def __init__(
        self,
        *,
        kernel: str | None = None,
        image: Path | None = None,
        hidden: Collection[Path] = (),
        why_shared: str | None = None,
    ) -> None:
        self.why_shared = why_shared
        self._kernel = kernel
        self._image = image
        self.hidden = tuple(hidden)
        self.channel: Callable[[NamespaceSandbox], socket.socket | None] = lambda _: None
        """Returns a socket that the driver of a new sandbox inherits (`wire.PRELOAD_VARIABLE`), if any."""
        self._images: dict[str, ImageFolder] = {}

    @cached_property
    def program(self) -> str:
        """The path of bwrap. Raises ProviderUnavailableError."""
        return find_program()

    @cached_property
    def hierarchies(self) -> Hierarchies:
        return Hierarchies.of_this_process()

    @cached_property
    def network(self) -> OwnNetwork | None:
        """How sandboxes get a network of their own; None if they do not. Raises ProviderUnavailableError."""
        return OwnNetwork.of_this_machine() if self.why_shared is None else None

    @cached_property
    def host_files(self) -> HostFiles:
        """This machine's files for sandboxes without a network. Blocks. Raises ProviderUnavailableError."""
        return HostFiles.of_this_server(self.hidden)

    @cached_property
    def _host_files_with_network(self) -> HostFiles:
        return self.host_files.with_network(None if self.network is None else self.network.nameserver)

    def files(self, spec: SandboxSpec) -> RootFiles:
        """What a sandbox starts with. Raises ImageError, ProviderUnavailableError."""
        if spec.image is not None or self._kernel is not None:
            return self.image(spec.image)
        return self.host_files if spec.network == "none" else self._host_files_with_network

    def image(self, name: str | None) -> ImageFolder:
        """The image in this folder, or with this digest. Raises ImageError, also if none is named."""
        if name is None:
            raise ImageError(f"sandboxes with the kernel {self._kernel} need an unpacked image: {UNPACK}")
        if name not in self._images:
            self._images[name] = self._read_image(name)
        return self._images[name]

    def _read_image(self, name: str) -> ImageFolder:
        if not name.startswith("sha256:"):
            return ImageFolder.read(Path(name).expanduser().absolute())
        image = None if self._image is None else ImageFolder.read(self._image)
        if image is None or image.digest != name:
            raise ImageError(f"image {name} is not the one in {self._image}", image=name)
        return image
