"""The command line of bubblewrap (bwrap(1), version 0.7 or later) for one sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath

from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.bubblewrap.mounts import (
    CopiedFiles,
    RootFiles,
    WritableFolder,
    memory_mount,
    writable_folders,
)

HOST_NAME = "sandbox"
SHARED_MEMORY_BYTES = 64 << 20
"""Size of /dev/shm, as in a container."""
_VIRTUAL = (PurePosixPath("/proc"), PurePosixPath("/dev"))
_NAMESPACES = ("user", "pid", "ipc", "uts")


@dataclass(frozen=True, slots=True)
class SandboxFiles:
    """Open files that bubblewrap uses, by descriptor.

    `status`: it writes there which process is the first one, and its exit code. `block`: one end of a socket
    from which it reads a byte when everything is set up, and closes it. `seccomp`: the filter.
    """

    status: int
    block: int
    seccomp: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.status, self.block, self.seccomp)


def bubblewrap_command(
    program: str,
    spec: SandboxSpec,
    root: RootFiles,
    files: SandboxFiles,
    stack: ExitStack,
    *,
    shares_network: bool = False,
) -> tuple[list[str], Sequence[int]]:
    """The command line, and descriptors of further files that it needs; `stack` closes those.

    `shares_network`: the sandbox has this machine's network, its loopback interface included.
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
    command += ["--json-status-fd", str(files.status), "--block-fd", str(files.block)]
    command += ["--seccomp", str(files.seccomp)]
    command.append("--clearenv")
    for name, value in {**root.environment, "HOME": str(root.user.home), "HOSTNAME": HOST_NAME}.items():
        command += ["--setenv", name, value]
    command += root.first_mounts([*_VIRTUAL, *(folder.path for folder in folders)], copied)
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    command += memory_mount(WritableFolder(PurePosixPath("/dev/shm"), SHARED_MEMORY_BYTES, 0o1777))
    command += ["--remount-ro", "/dev"]
    for folder in folders:
        command += memory_mount(folder)
        command += root.mounts_in(folder, copied)
    # After everything has been created in it.
    command += ["--remount-ro", "/", "--chdir", str(spec.root), "--", *spec.command]
    return command, copied.descriptors
