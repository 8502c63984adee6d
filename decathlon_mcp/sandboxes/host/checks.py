"""What `doctor` says of sandboxes of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from decathlon_mcp.errors import DecathlonError, ImageError
from decathlon_mcp.sandboxes.base import Finding, LimitName, finding
from decathlon_mcp.sandboxes.host.command import ALLOW, INSTALL, lacks_namespaces, program_version
from decathlon_mcp.sandboxes.host.image_folder import UNPACK
from decathlon_mcp.sandboxes.host.machine import Machine
from decathlon_mcp.sandboxes.host.network import PROGRAM
from decathlon_mcp.sandboxes.plugins import another_provider

FREE_BYTES = 1 << 30


def check_plain(why: str | None) -> list[Finding]:
    """What `doctor` says of sandboxes without isolation. `why`: the reason for that, if nobody chose it."""
    reason = f" ({why})" if why else ""
    python = shutil.which("python3", path=str(Path(sys.executable).parent))
    return [
        Finding("isolation", True, f"none: sandboxes are processes of this user{reason}"),
        finding(
            "/proc",
            Path("/proc/thread-self/children").exists(),
            "shows which processes belong to a sandbox",
            "sandboxes without isolation require Linux with /proc mounted, and a kernel that lists the "
            f"children of a process there (CONFIG_PROC_CHILDREN), which {another_provider()} does not",
        ),
        finding(
            "python3",
            python is not None,
            f"{python or 'none'} (Python {platform.python_version()})",
            f"there is no python3 next to {sys.executable}: run the server in a virtual environment",
        ),
    ]


def check_host_files(machine: Machine) -> list[Finding]:
    """How sandboxes with this machine's files are isolated, and which network they have."""
    network = f"{shutil.which(PROGRAM)}: leads to other machines and not to this one"
    if machine.why_shared is not None:
        shared = "sandboxes of tasks that need a network share that of this machine"
        network = f"{shared}: {machine.why_shared}"
    isolation = "namespaces: sandboxes see this machine's programs and nothing else of it"
    return [Finding("isolation", True, isolation), Finding("network", True, network)]


def check_bubblewrap(machine: Machine, unlimited: Collection[LimitName]) -> list[Finding]:
    """The program's version, and what limits sandboxes have. Raises ProviderUnavailableError. Blocks."""
    version, is_recent = program_version(machine.program)
    limits = "memory, CPUs and processes"
    if unlimited:
        limits = (
            f"no limit on {', '.join(unlimited)}: the server may not create control groups; run it as root, "
            "or with `systemd-run --user --scope`"
        )
    return [
        finding("program", is_recent, f"{version} at {machine.program}", INSTALL),
        Finding("limits", True, limits),
    ]


def check_folder(folder: Path) -> Finding:
    """Whether the folder of the sandboxes can be used. Blocks."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return finding(
        "folder",
        existing.is_dir() and os.access(existing, os.W_OK) and free >= FREE_BYTES,
        f"{folder}, {free >> 20} MiB free",
        "choose a writable folder with 1 GiB free (--state)",
    )


def image_cure(error: DecathlonError, message: str) -> str:
    """What to do about a sandbox of an image that could not be opened."""
    if isinstance(error, ImageError):
        return UNPACK
    if lacks_namespaces(message):
        return ALLOW
    if "ermission denied" in message:
        return "the image's folder, and those above it, must be accessible to the owner of its files"
    # What is missing, as its error says.
    _, _, program = message.partition(": install ")
    return f"{f'install {program}' if program else INSTALL}, or use {another_provider()}"
