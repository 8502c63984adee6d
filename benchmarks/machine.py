"""The machine that a result was measured on: what it is, its CPU time and its memory."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import docker

PACKAGES = ("mcp", "uvicorn", "uvloop", "httptools")
KIB_PER_MIB = 1024


def machine() -> dict[str, str]:
    """Return cores, memory, kernel, engine, Python and the load before the benchmarks start."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores ({_processor()}), {memory_gib:.0f} GiB",
        "kernel": f"Linux {'.'.join(platform.release().split('.')[:2])}",
        "engine": f"Docker {docker.APIClient().version()['Version']}",
        "python": f"Python {'.'.join(map(str, sys.version_info[:3]))}, " + ", ".join(map(_version, PACKAGES)),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def process_cpu_seconds(pid: int) -> float:
    """User and system time that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def available_memory_mib() -> float:
    """Memory that could be used without swapping."""
    return _kib("/proc/meminfo", "MemAvailable") / KIB_PER_MIB


def resident_memory_kib(pid: int) -> int:
    """Resident memory of a process."""
    return _kib(f"/proc/{pid}/status", "VmRSS")


def processes_with(mark: bytes) -> int:
    """Number of processes, except this one, with the mark in their environment or command line."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                texts = (folder / "environ").read_bytes() + b"\0" + (folder / "cmdline").read_bytes()
            except OSError:
                continue
            count += mark in texts
    return count


def _kib(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
