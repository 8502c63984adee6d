"""Description of the machine that a result was measured on."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import docker

PACKAGES = ("mcp", "uvicorn", "uvloop", "httptools")


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


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
