"""Checks of an engine for `doctor`: its limit of open files, its runtime, and its disk."""

from __future__ import annotations

import re
import shutil
import socket
import struct
from pathlib import Path, PurePosixPath

from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.storage.disk import read_kernel_file
from decathlon_mcp.types import JsonObject, as_object

DESCRIPTORS_PER_CONTAINER = 12
"""File descriptors of the engine's process for a container with an attached stream. Measured: 8."""
ENGINE_DESCRIPTORS = 256
"""File descriptors that it needs without containers."""
FREE_BYTES = 2 << 30
_CREDENTIALS = struct.Struct("iii")


def check_engine_limits(max_sandboxes: int, address: str) -> Finding | None:
    """Compare the engine's limit of open files with the number of sandboxes.

    `address` as in DOCKER_HOST. None if the engine is not on this machine or its limit cannot be read, and
    before it runs: a socket of systemd does not belong to it yet.
    """
    scheme, _, path = address.partition("://")
    if scheme != "unix":
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)  # a local socket, which is full only if its engine hangs
            connection.connect(path)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process = Path(f"/proc/{_CREDENTIALS.unpack(credentials)[0]}")
        is_engine = read_kernel_file(process / "comm").strip() == "dockerd"
        soft = re.search(r"^Max open files +(\d+)", read_kernel_file(process / "limits"), re.MULTILINE)
    except OSError:
        return None
    if not is_engine or soft is None:
        return None
    limit = int(soft[1])
    needed = ENGINE_DESCRIPTORS + DESCRIPTORS_PER_CONTAINER * max_sandboxes
    return finding(
        "limits",
        limit >= needed,
        f"the engine may open {limit} files, {needed} are needed",
        f"start it with `ulimit -n {needed}`, or set LimitNOFILE={needed} in its systemd unit",
        required=False,
    )


def check_runtime(facts: JsonObject, name: str | None) -> list[Finding]:
    """Whether the engine has this runtime, and what sandboxes lack if it is gVisor's, under whatever name.

    `facts`: the engine's answer to `info`. `name`: None for the engine's default runtime.
    """
    runtimes = as_object(facts.get("Runtimes")) or {}
    if name is not None and name not in runtimes:
        cure = (
            f"add it to the engine's daemon.json (gVisor: `runsc install`) and restart the engine, or choose "
            f"another --provider-option runtime=NAME: {', '.join(sorted(runtimes))}"
        )
        return [Finding("runtime", False, f"the engine has no runtime {name}", cure)]
    used = name or str(facts.get("DefaultRuntime"))
    runtime = as_object(runtimes.get(used)) or {}
    program = PurePosixPath(str(runtime.get("path", ""))).name
    # A runtime has a path, or the type of a containerd shim: `io.containerd.runsc.v1`.
    if not re.search("runsc|gvisor", f"{used} {program} {runtime.get('runtimeType', '')}", re.IGNORECASE):
        return [] if name is None else [Finding("runtime", True, used)]
    arguments = [str(argument) for argument in runtime.get("runtimeArgs") or ()]
    if "overlay2 none" in " ".join(arguments).replace("=", " "):
        keeps_files = Finding("runtime", True, f"{used} {' '.join(arguments)}")
    else:
        # A script can give the option too, and a shim has it in a file of its own.
        keeps_files = Finding(
            "runtime",
            program != "runsc",
            f"{used}: without --overlay2=none, gVisor keeps what a container writes where no grader finds it",
            f'set "runtimeArgs": ["--overlay2=none"] for {used} in the engine\'s daemon.json, and restart it',
        )
    return [
        keeps_files,
        Finding(
            "isolation",
            True,
            f"{used} is gVisor: an agent that is root in a container can write to the driver's connection",
            "unless you trust the agents to look for no reward there: --provider host --kernel gvisor, or "
            "another runtime",
        ),
    ]


def check_disk(facts: JsonObject, program: str = "docker") -> list[Finding]:
    """Free space where an engine on this machine keeps its containers; nothing for a remote engine.

    `facts`: the engine's answer to `info`. `program`: the engine's command.
    """
    try:
        free = shutil.disk_usage(str(facts["DockerRootDir"])).free
    except (OSError, KeyError):
        return []
    cure = f"free disk space: {program} system prune"
    return [finding("disk", free >= FREE_BYTES, f"{free >> 20} MiB free", cure, required=False)]
