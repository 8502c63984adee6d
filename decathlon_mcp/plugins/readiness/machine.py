"""Checks of this machine: its packages, the starter's servers, the merging of memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import anyio
import anyio.to_thread
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from rich.text import Text

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import MissingProgram
from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.readiness.suites import probe_suite
from decathlon_mcp.sandboxes.base import Finding, Limits, Provider, SandboxSpec, finding
from decathlon_mcp.suites.loading import STARTER
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.types import read_object

STARTER_SERVERS = {"excel": "excel_mcp", "git": "mcp_server_git"}
"""Modules of the extra `starter` by the names of the MCP servers that need them."""
STARTER_CURE = "in the clone: pip install '.[server,starter]', which also brings the `mcp` that they need"


async def check_machine(
    catalogue: Catalogue, factories: Mapping[str, SandboxFactory], openable: Collection[str]
) -> AsyncGenerator[Finding]:
    """Check this machine's packages, and the suites inside of their sandboxes. Never raises.

    `openable`: the suites whose sandboxes can be opened. A suite usually takes a second. The programs that
    its sandboxes lack are recorded in the catalogue.
    """
    yield await anyio.to_thread.run_sync(check_packages)
    merging: set[tuple[str, str | None]] = set()
    for name, factory in factories.items():
        place = (factory.provider.name, factory.image)
        if factory.merge_pages and name in openable and place not in merging:
            merging.add(place)
            for result in await check_merging(factory.provider, factory.image, factory.suite.profile.root):
                yield replace(result, what=f"{factory.provider.name} {result.what}")
        if factory.suite.path != STARTER:
            async for result in probe_suite(factory, catalogue, can_open=name in openable):
                yield result
        elif factory.image is None:  # the tasks' servers are this machine's programs
            yield _check_starter_servers(factory.suite, catalogue)


def _check_starter_servers(suite: Suite, catalogue: Catalogue) -> Finding:
    absent = {name: module for name, module in STARTER_SERVERS.items() if find_spec(module) is None}
    # Their newest versions need mcp 2.2 and 2.3. With an older `mcp`, tasks that need them cannot be started.
    programs = {
        name: MissingProgram(module, downloadable=False, cure=STARTER_CURE) for name, module in absent.items()
    }
    catalogue.record_missing_programs(suite, programs)
    return finding(
        "starter servers",
        not absent,
        f"not installed: {', '.join(absent.values())}" if absent else ", ".join(STARTER_SERVERS.values()),
        STARTER_CURE,
        required=False,
    )


KSM_FOLDER = Path("/sys/kernel/mm/ksm")
SLOW_MIB_PER_SECOND = 100
"""Below this the kernel looks at memory more slowly than four openings at once fill it. Its default is 20."""
PAGES_TO_SCAN = 5000
"""What `doctor` advises: up to a GiB each second, at the default pause of 20 ms."""
PROBE_SECONDS = 15.0
_MERGING_PROBE = """
import ctypes, json
libc = ctypes.CDLL(None)
# The argument is a long; as an int, which is the default, it would be extended to another value.
personality = libc.personality(ctypes.c_ulong(0xFFFFFFFF))
merges = libc.prctl(68, 0, 0, 0, 0) == 1  # PR_GET_MEMORY_MERGE
fixed = personality != -1 and bool(personality & 0x0040000)  # ADDR_NO_RANDOMIZE
print(json.dumps({"merging": merges, "fixed_addresses": fixed}))
"""
"""Whether memory merging and fixed addresses hold for a program that the driver has executed, as JSON."""


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
                argv = ["python3", "-I", "-c", _MERGING_PROBE]
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


PROJECT = "decathlon-mcp"
SERVER = "server"
"""The extra that every server needs."""
CURE = (
    "install decathlon-mcp in an environment of its own, apart from trainers: "
    "python3 -m venv .venv && .venv/bin/pip install '.[server,starter]'"
)
MAX_SHOWN = 8


def check_packages(project: str = PROJECT) -> Finding:
    """Compare every installed package with what the project, and what it needs, require of it. Blocks.

    Extras count if all that they name is installed; `server` counts in any case.
    """
    checked, problems = _check(project)
    if problems:
        shown = problems[:MAX_SHOWN]
        more = [f"{len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        detail = "\n".join([f"{len(problems)} not as needed", *shown, *more])
    else:
        detail = f"{checked} installed, all as needed"
    return finding("packages", not problems, detail, CURE, required=False)


def _check(project: str) -> tuple[int, list[str]]:
    """The number of packages, and a line for each requirement that is not met."""
    own = _find(project)
    if own is None:
        return 0, [f"{project} is not installed as a package, so nothing says what it needs"]
    extras = own.metadata.get_all("Provides-Extra") or []
    todo = [(own, frozenset({SERVER, *(extra for extra in extras if _is_installed(own, extra))}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    problems: list[str] = []
    while todo:
        package, wanted = todo.pop()
        name = canonicalize_name(package.name)
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for requirement in _requirements(package, wanted):
            found = _find(requirement.name)
            if found is None:
                problems.append(f"{requirement.name} is not installed: {name} needs it")
            elif not requirement.specifier.contains(found.version, prereleases=True):
                problems.append(f"{requirement.name} {found.version}: {name} needs {requirement.specifier}")
            if found is not None:
                todo.append((found, frozenset(requirement.extras)))
    return len({name for name, _ in seen}), sorted(set(problems))


def _is_installed(package: Distribution, extra: str) -> bool:
    without = {str(requirement) for requirement in _requirements(package, ())}
    own = [requirement for requirement in _requirements(package, (extra,)) if str(requirement) not in without]
    return all(_find(requirement.name) is not None for requirement in own)


def _requirements(package: Distribution, extras: Collection[str]) -> Iterator[Requirement]:
    """The package's requirements on this machine, with the requirements of its extras."""
    for text in package.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # of some old packages; pip ignores it too
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def format_finding(result: Finding) -> Text:
    """One finding for a terminal: its mark, its detail, and below it what to do."""
    first, *details = result.detail.splitlines()
    mark = ("✗   ", "bold red")
    if result.ok:
        mark = ("!   ", "bold yellow") if result.is_problem else ("ok  ", "green")
    text = Text.assemble(mark, (f"{result.what}: ", "bold"), first)
    for detail in details:
        text.append(f"\n      {detail}", "dim")
    if result.cure and result.cure not in result.detail:
        text.append(f"\n    → {result.cure}", "yellow")
    return text
