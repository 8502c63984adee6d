"""Limits of the kernel that all sandboxes of one machine share, compared with the number of sandboxes.

The kernel counts these things for each user or for the whole machine. Sandboxes that run as root are one user
for it, in containers too, so that one sandbox can use up what the others need.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp.sandboxes.base import Finding, finding

SYSCTL_FOLDER = Path("/proc/sys")
SERVER_DESCRIPTORS = 256
"""File descriptors that the server needs besides those of its sandboxes."""
DESCRIPTORS_PER_SANDBOX = 8


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """A sysctl, and how much of it one ordinary sandbox uses."""

    name: str
    per_sandbox: int


# What several MCP servers and a program of the agent need; an agent that tries can use up any of them.
SHARED_LIMITS = (
    SharedLimit("fs.inotify.max_user_instances", 2),
    SharedLimit("fs.inotify.max_user_watches", 1024),
    SharedLimit("kernel.pid_max", 64),
    SharedLimit("kernel.threads-max", 64),
    SharedLimit("fs.file-max", 256),
    SharedLimit("kernel.keys.root_maxkeys", 2),
    SharedLimit("user.max_pid_namespaces", 1),
    SharedLimit("user.max_mnt_namespaces", 1),
    SharedLimit("user.max_net_namespaces", 1),
    SharedLimit("user.max_ipc_namespaces", 1),
    SharedLimit("user.max_uts_namespaces", 1),
)


def check_kernel_limits(max_sandboxes: int, folder: Path = SYSCTL_FOLDER) -> Finding:
    """Whether this machine's limits suffice for that many ordinary sandboxes. Unreadable ones are skipped."""
    low: list[tuple[str, int, int]] = []
    for limit in SHARED_LIMITS:
        value, needed = _read(folder / limit.name.replace(".", "/")), limit.per_sandbox * max_sandboxes
        if value is not None and value < needed:
            low.append((limit.name, value, needed))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    descriptors = SERVER_DESCRIPTORS + DESCRIPTORS_PER_SANDBOX * max_sandboxes
    cures = [f"sysctl -w {name}={needed}" for name, _, needed in low]
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        low.append(("open files of the server", soft, descriptors))
        cures.append(f"ulimit -n {descriptors}")
    details = ", ".join(f"{name} is {value}, {needed} are needed" for name, value, needed in low)
    return finding(
        "kernel limits",
        not low,
        details or f"suffice for {max_sandboxes} sandboxes",
        f"{'; '.join(cures)}; or fewer sandboxes (--max-sandboxes)",
    )


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None
