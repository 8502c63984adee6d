"""Whether merging works here: the kernel's merging thread, and what a process in a sandbox gets."""

from __future__ import annotations

import os
import secrets
from pathlib import Path, PurePosixPath

import anyio

from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.base import Finding, Limits, Provider, SandboxSpec, finding
from decathlon_mcp.types import read_object

KSM_FOLDER = Path("/sys/kernel/mm/ksm")
SLOW_MIB_PER_SECOND = 100
"""Below this the kernel looks at memory more slowly than four openings at once fill it. Its default is 20."""
PAGES_TO_SCAN = 5000
"""What `doctor` advises: up to a GiB each second, at the default pause of 20 ms."""
PROBE_SECONDS = 15.0


async def check_merging(
    provider: Provider, image: str | None, root: PurePosixPath, *, folder: Path = KSM_FOLDER
) -> list[Finding]:
    """Check the kernel's merging thread, and that its setting survives the execution of a program.

    Opens a sandbox of `image` with the suite's `root`. Never raises.
    """
    return [_check_thread(folder), await _check_sandbox(provider, image, root)]


def _check_thread(folder: Path) -> Finding:
    """Whether the kernel's thread runs, and fast enough."""
    what = "merging thread"
    run, pages, pause = (_read(folder / name) for name in ("run", "pages_to_scan", "sleep_millisecs"))
    if run is None:
        cure = "a kernel with CONFIG_KSM; without it, --merge-pages saves nothing"
        return Finding(
            what, False, "the kernel of this machine has none, or does not show it", cure, required=False
        )
    if run != 1:
        cure = (
            f"as root: echo 1 > {folder}/run; echo {PAGES_TO_SCAN} > {folder}/pages_to_scan; "
            "it is off again after the next boot"
        )
        return Finding(what, False, "it does not run", cure, required=False)
    if pages is None or not pause:
        return Finding(what, True, "runs")
    speed = pages * os.sysconf("SC_PAGE_SIZE") * 1000 // pause >> 20
    advised = "[scan-time]" in _text(folder / "advisor_mode")
    return finding(
        what,
        advised or speed >= SLOW_MIB_PER_SECOND,
        f"looks at up to {speed} MiB of memory each second",
        f"as root: echo {PAGES_TO_SCAN} > {folder}/pages_to_scan",
        required=False,
    )


async def _check_sandbox(provider: Provider, image: str | None, root: PurePosixPath) -> Finding:
    """Whether a program that the driver executes in a sandbox with merging has both settings."""
    name = f"merging-{secrets.token_hex(6)}"
    spec = SandboxSpec(name, BOOT_COMMAND, root, image, limits=Limits(memory_mib=256), merge_pages=True)
    try:
        with anyio.fail_after(PROBE_SECONDS):
            async with provider.open(spec) as sandbox, connect(sandbox) as driver:
                argv = ["python3", "-I", "-c", source("merging_probe")]
                result = await driver.run(argv, cwd="/", timeout_seconds=PROBE_SECONDS)
    except DecathlonError as error:
        cure = "see the other findings"
        return Finding("merging in a sandbox", False, error.message, cure, required=False)
    except TimeoutError:
        return Finding("merging in a sandbox", True, "not checked: the machine is busy")
    settings = read_object(result.stdout) or {}
    missing = [
        f"{text} for executed programs"
        for key, text in (("merging", "no merging"), ("fixed_addresses", "no fixed addresses"))
        if settings.get(key) is not True
    ]
    return finding(
        "merging in a sandbox",
        not missing,
        ", ".join(missing) or "holds for executed programs, with fixed addresses",
        "Linux 6.12 or later, and an engine on this machine that takes seccomp profiles",
        required=False,
    )


def _read(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except OSError:
        return ""
