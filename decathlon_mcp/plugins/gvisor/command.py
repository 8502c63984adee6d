"""Command lines for one sandbox: bubblewrap's, runsc's inside of it, and those for programs in the sandbox.

bubblewrap gives runsc namespaces in which it is root, and nothing of this machine but its own program and the
image. So neither needs to be root here, and what leaves gVisor's kernel is still in those namespaces.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from decathlon_sandbox import wire

from decathlon_mcp.errors import ImageError
from decathlon_mcp.plugins.inside_archives import program_inside
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.command import HOST_NAME, SHARED_MEMORY_BYTES
from decathlon_mcp.sandboxes.host.image_folder import ImageFolder
from decathlon_mcp.sandboxes.host.mounts import CopiedFiles, WritableFolder, writable_folders
from decathlon_mcp.sandboxes.host.seccomp import compile_filter
from decathlon_mcp.types import JsonObject

RUNSC, IMAGE, BUNDLE, STATE = "/runsc", "/image", "/bundle", "/state"
SAVED, SNAPSHOT = "/saved", "/snapshot"
"""Paths in the namespaces of runsc."""
CONTAINER = "sandbox"
STATE_FILE = f"state/{CONTAINER}_sandbox:{CONTAINER}.state"
"""In the root of runsc's namespaces."""
OPTIONS = (
    f"--root={STATE}",
    # Loopback only, and nothing of the namespaces' network.
    "--network=none",
    # Those of all of runsc's processes are set outside.
    "--ignore-cgroups",
    "--platform=systrap",
    # The home is a folder of the image: what is written there stays in the sandbox's memory.
    "--overlay2=all:memory",
)
"""A saved sandbox can only be restored with the same ones."""
PYTHON = "python3"
OPEN_FILES = 1 << 20
"""As in a container."""
_PROGRAM = program_inside("decathlon_mcp.plugins.gvisor")
_NAMESPACES = ("user", "pid", "ipc", "uts", "net")


def outer_command(
    program: str,
    runsc: Path,
    spec: SandboxSpec,
    image: ImageFolder,
    stack: ExitStack,
    *,
    status: int,
    started: int,
    log: int,
    saved: Path | None = None,
    snapshot: Sequence[tuple[str, int]] = (),
) -> tuple[list[str], Sequence[int]]:
    """The command line of bubblewrap, and descriptors of further files that it needs; `stack` closes those.

    `status`: bubblewrap writes there which process is the first one, and its exit code. `started`: runsc
    writes something there when gVisor's kernel runs. `log`: a file in which runsc notes how the sandbox's
    first process ended. `saved`: the folder that is `SAVED` for runsc. `snapshot`: names and descriptors of
    the files from which the sandbox is restored.
    """
    copied = CopiedFiles(stack)
    bundle = json.dumps(bundle_config(spec, image)).encode()
    command = [program, *(f"--unshare-{name}" for name in _NAMESPACES), "--unshare-cgroup-try"]
    command += ["--uid", "0", "--gid", "0", "--hostname", HOST_NAME, "--as-pid-1", "--new-session"]
    command += ["--cap-add", "ALL"]
    if not spec.survives:
        command.append("--die-with-parent")
    command += ["--json-status-fd", str(status), "--clearenv"]
    command += ["--ro-bind", str(runsc), RUNSC, "--ro-bind", str(image.root), IMAGE]
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", STATE, "--dir", "/tmp"]
    command += ["--perms", "0644", "--ro-bind-data", copied.add_content(bundle), f"{BUNDLE}/config.json"]
    if saved is not None:
        command += ["--bind", str(saved), SAVED]
    for name, descriptor in snapshot:
        command += ["--symlink", f"/proc/self/fd/{descriptor}", f"{SNAPSHOT}/{name}"]
    verb, options = ("restore", [f"--image-path={SNAPSHOT}"]) if snapshot else ("run", [])
    command += ["--chdir", "/", "--", RUNSC, *OPTIONS]
    # Of this process only: what runsc's others note depends on what runs in the sandbox, without a bound.
    command += [f"--debug-log=/proc/self/fd/{log}", f"--debug-command={verb}"]
    command += [verb, *options, f"--bundle={BUNDLE}", f"--pid-file=/proc/self/fd/{started}", CONTAINER]
    return command, (*copied.descriptors, *(descriptor for _, descriptor in snapshot))


def inner_command(namespaces: Sequence[tuple[str, int]], *arguments: str) -> list[str]:
    """A command line of runsc in the namespaces of a sandbox: kind and descriptor of each."""
    entered = [f"--{kind}=/proc/self/fd/{descriptor}" for kind, descriptor in namespaces]
    return ["nsenter", "--preserve-credentials", *entered, "--", RUNSC, *OPTIONS, *arguments]


def inside_command(image: ImageFolder, *arguments: str) -> list[str]:
    """A command line of `inside.py` in a sandbox. Raises ImageError if the image has no Python."""
    # In the home an agent could replace it. Nothing else of the image can be changed: this is Python.
    python = image.find_program(PYTHON, outside=image.user.home)
    if python is None:
        raise ImageError(
            f"image {image.location} has no {PYTHON} on its PATH outside of the home folder",
            image=str(image.location),
        )
    return [f"/{python.relative_to(image.root)}", "-I", "-S", "-c", _PROGRAM, *arguments]


def bundle_config(spec: SandboxSpec, image: ImageFolder) -> JsonObject:
    """The configuration of the sandbox (OCI runtime specification, 1.0)."""
    user, limits = image.user, spec.limits
    variables = {**image.environment, "HOME": str(user.home), "HOSTNAME": HOST_NAME}
    rlimits: list[JsonObject] = [{"type": "RLIMIT_NOFILE", "soft": OPEN_FILES, "hard": OPEN_FILES}]
    if limits.pids is not None:
        rlimits.append({"type": "RLIMIT_NPROC", "soft": limits.pids, "hard": limits.pids})
    if limits.memory_mib is not None:
        # gVisor's kernel does not end processes when memory is short, so the driver does.
        variables[wire.MEMORY_VARIABLE] = str(limits.memory_mib)
    command = [
        "first",
        str(spec.root),
        base64.b64encode(compile_filter(devices=False)).decode(),
        *spec.command,
    ]
    # For what `first` does before it drops them.
    capabilities = ["CAP_SYS_ADMIN", "CAP_SETPCAP", "CAP_CHOWN"]
    mounts: list[JsonObject] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        _memory_mount(WritableFolder(PurePosixPath("/dev/shm"), SHARED_MEMORY_BYTES, 0o1777), 0, 0),
    ]
    home = image.real_path(user.home)
    for folder in writable_folders(image, spec.root, limits):
        has_content = folder.path == home and (image.root / home.relative_to("/")).is_dir()
        mounts.append(
            {"destination": str(home), "type": "bind", "source": f"{IMAGE}{home}", "options": ["bind", "rw"]}
            if has_content
            else _memory_mount(folder, user.user, user.group)
        )
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": user.user, "gid": user.group},
            "args": inside_command(image, *command),
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": rlimits,
            "noNewPrivileges": True,
        },
        "root": {"path": IMAGE, "readonly": True},
        "hostname": HOST_NAME,
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
    }


def _memory_mount(folder: WritableFolder, user: int, group: int) -> JsonObject:
    options = [f"mode={folder.mode:o}", f"size={folder.size_bytes}", "nosuid", "nodev"]
    owner = [f"uid={user}", f"gid={group}"] if user or group else []
    return {
        "destination": str(folder.path),
        "type": "tmpfs",
        "source": "tmpfs",
        "options": [*options, *owner],
    }
