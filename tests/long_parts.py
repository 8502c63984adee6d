"""Runs the tests that take too long for every change: `python -m tests.long_parts [PART...]`.

Each part is a program, a test module that `make test-all` leaves out, or the tests marked `long`. After it,
its date, commit, minutes and result are written to `long_parts.json` next to this module, which is committed.
All parts take less than two hours on an idle machine. `--warn` only names the parts that have not passed
since the code they cover changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

RECORD = Path(__file__).with_suffix(".json")

_PYTEST = ("-m", "pytest")
_SERVER, _CLIENT, _SANDBOX = "decathlon_mcp", "clients", "sandbox"
_HTTP, _PROTOCOL, _DRIVER = "decathlon_mcp/http", "decathlon_mcp/protocol", "decathlon_mcp/driver"
_PLUGINS, _EXPORTS = "decathlon_mcp/plugins", "decathlon_mcp/plugins/exports"


@dataclass(frozen=True, slots=True)
class Part:
    """`arguments` of Python, and the folders and files whose change makes a run outdated."""

    arguments: tuple[str, ...]
    covers: tuple[str, ...]


def _tests(path: str, *covers: str) -> Part:
    return Part((*_PYTEST, path), (path, *covers))


PARTS: dict[str, Part] = {
    # The part `gvisor` has its tests.
    "marked tests": Part((*_PYTEST, "-m", "long and not gvisor", "tests"), (_SERVER, _SANDBOX, _CLIENT)),
    "gvisor": Part(("-m", "tests.sandboxes.all_of_gvisor"), (f"{_PLUGINS}/gvisor", _SANDBOX)),
    "podman": _tests("tests/sandboxes/podman.py", f"{_PLUGINS}/docker"),
    "clients killed": _tests("tests/survival/other_clients.py", _PROTOCOL, _HTTP),
    "client programs": _tests("tests/docs/clients.py", "docs/clients.md", _PROTOCOL),
    "client SDKs": _tests("tests/cheats/sdks.py", _DRIVER, _PROTOCOL),
    "agent programs": _tests("tests/agents/programs.py", "docs/agent-programs.md", f"{_PLUGINS}/agents"),
    "trainers": _tests("tests/trainers/trainers.py", "docs/trainers.md", _CLIENT),
    "harbor": _tests("tests/trainers/harbor.py", _EXPORTS),
    "evaluating": _tests("tests/trainers/evaluating.py", "docs/evaluating.md", _CLIENT, _EXPORTS),
    "collectors": _tests(
        "tests/telemetry/collectors.py", "decathlon_mcp/telemetry", f"{_PLUGINS}/metrics.py"
    ),
    "bundle": _tests("tests/packaging/bundle.py", "packaging", "pyproject.toml"),
    "publishing": _tests("tests/packaging/publishing.py", "packaging", "pyproject.toml"),
    "many files": _tests("tests/cheats/many_files.py", "decathlon_mcp/archives", _SANDBOX),
    "ray": _tests("tests/ray/three_nodes.py", f"{_PLUGINS}/cluster"),
    "fuzz of HTTP": Part(("-m", "tests.fuzz.http", "--minutes", "2"), (_HTTP,)),
    "fuzz of lines": Part(("-m", "tests.fuzz.lines", "--minutes", "2"), (_SANDBOX, _DRIVER)),
    "kills": Part(
        ("-m", "benchmarks.survival", "kills"), ("decathlon_mcp/episodes", "decathlon_mcp/storage")
    ),
}
"""The docstring of a part's module says what it needs beyond the tests' environment."""


def read_runs() -> dict[str, dict[str, Any]]:
    """The last run of each part that has ever run: its date, commit, minutes and result."""
    return json.loads(RECORD.read_bytes())


def overdue(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each part that has not passed since the code it covers changed."""
    for name, part in PARTS.items():
        if (run := runs.get(name)) is None:
            yield f"{name}: no run is recorded"
            continue
        when = f"{run['at'][:10]} at {run['commit']}"
        if not run["passed"]:
            yield f"{name}: failed on {when}"
        elif changed_since(run["commit"], part.covers):
            yield f"{name}: the code has changed since it passed on {when}"


def changed_since(commit: str, paths: tuple[str, ...]) -> bool:
    """Whether files differ from those of a commit; one that this clone does not have is another one."""
    command = ("git", "diff", "--quiet", commit, "--", *paths)
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode != 0


def has_run(report: Path) -> bool:
    """Whether a test of pytest's report was not skipped: a part whose tests all are has shown nothing."""
    suite = ElementTree.parse(report).getroot()[0]
    return int(suite.get("tests", 0)) > int(suite.get("skipped", 0))


def _run(part: str) -> bool:
    sys.stdout.write(f"== {part}\n")
    sys.stdout.flush()
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        arguments = PARTS[part].arguments
        if arguments[: len(_PYTEST)] == _PYTEST:
            arguments += (f"--junitxml={report}",)
        passed = subprocess.run((sys.executable, *arguments), check=False).returncode == 0
        if passed and report.exists():
            passed = has_run(report)
    minutes = round((time.monotonic() - started) / 60, 1)
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), check=True, capture_output=True, text=True
    ).stdout.strip()
    at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    runs = {**read_runs(), part: {"at": at, "commit": commit, "passed": passed, "minutes": minutes}}
    RECORD.write_text(json.dumps({name: runs[name] for name in PARTS if name in runs}, indent=2) + "\n")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.long_parts", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument(
        "--warn", action="store_true", help="run nothing; name what has not passed on this code"
    )
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if arguments.warn:
        for line in overdue(read_runs()):
            sys.stdout.write(f"WARNING: long tests, {line}\n")
        return
    failed = [part for part in arguments.parts or PARTS if not _run(part)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
