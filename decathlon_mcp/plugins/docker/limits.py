"""An engine's limit of open files, compared with the number of sandboxes."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.storage.disk import read_kernel_file

DESCRIPTORS_PER_CONTAINER = 12
"""File descriptors of the engine's process for a container with an attached stream. Measured: 8."""
ENGINE_DESCRIPTORS = 256
"""Those that it needs without containers."""
_CREDENTIALS = struct.Struct("iii")


def check_engine_limits(max_sandboxes: int, address: str) -> Finding | None:
    """Compare the engine's limit of open files with the number of sandboxes.

    `address` as in DOCKER_HOST. None if the engine is not on this machine or its limit cannot be read, and
    before it runs: a socket of systemd does not belong to it yet.
    """
    pid = _engine_pid(address)
    limit = None if pid is None else _open_files(pid)
    if limit is None:
        return None
    needed = ENGINE_DESCRIPTORS + DESCRIPTORS_PER_CONTAINER * max_sandboxes
    return finding(
        "limits",
        limit >= needed,
        f"the engine may open {limit} files, {needed} are needed",
        f"start it with `ulimit -n {needed}`, or set LimitNOFILE={needed} in its systemd unit",
        required=False,
    )


def _engine_pid(address: str) -> int | None:
    scheme, _, path = address.partition("://")
    if scheme != "unix":
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)  # a local socket, which is full only if its engine hangs
            connection.connect(path)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(credentials)[0]
        return pid if read_kernel_file(Path(f"/proc/{pid}/comm")).strip() == "dockerd" else None
    except OSError:
        return None


def _open_files(pid: int) -> int | None:
    """The soft limit; None for no limit, too."""
    try:
        lines = read_kernel_file(Path(f"/proc/{pid}/limits")).splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdecimal() else None
    return None
