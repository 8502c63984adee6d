"""Runs the tests that take too long for every change: `python -m tests.long_parts [PART...]`.

Each part is a program, a test module that `make test-all` leaves out, or the tests marked `long`. After it,
its date, commit and result are written to `long_parts.json` next to this module, which is committed. `--warn`
only names the parts that have not passed for a week.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

RECORD = Path(__file__).with_suffix(".json")
MAX_AGE = timedelta(days=7)

_PYTEST = ("-m", "pytest")
PARTS: dict[str, tuple[str, ...]] = {
    "marked tests": (*_PYTEST, "-m", "long", "tests"),
    "clients killed": (*_PYTEST, "tests/survival/other_clients.py"),
    "client programs": (*_PYTEST, "tests/docs/clients.py"),
    "client SDKs": (*_PYTEST, "tests/cheats/sdks.py"),
    "agent programs": (*_PYTEST, "tests/agents/programs.py"),
    "trainers": (*_PYTEST, "tests/trainers/trainers.py"),
    "harbor": (*_PYTEST, "tests/trainers/harbor.py"),
    "evaluating": (*_PYTEST, "tests/trainers/evaluating.py"),
    "collectors": (*_PYTEST, "tests/telemetry/collectors.py"),
    "browsers": (*_PYTEST, "tests/web/browsers.py"),
    "bundle": (*_PYTEST, "tests/packaging/bundle.py"),
    "publishing": (*_PYTEST, "tests/packaging/publishing.py"),
    "many files": (*_PYTEST, "tests/cheats/many_files.py"),
    "private services": (*_PYTEST, "tests/services/prepared.py"),
    "podman": (*_PYTEST, "tests/sandboxes/podman.py"),
    "gvisor": ("-m", "tests.sandboxes.all_of_gvisor"),
    "ray": (*_PYTEST, "tests/ray/three_nodes.py"),
    "fuzz of HTTP": ("-m", "tests.fuzz.http", "--minutes", "5"),
    "fuzz of driver lines": ("-m", "tests.fuzz.driver_line", "--minutes", "5"),
    "fuzz of server lines": ("-m", "tests.fuzz.server_line", "--minutes", "5"),
    "kills": ("-m", "benchmarks.survival", "kills"),
    "deaths": ("-m", "benchmarks.survival", "deaths", "--count", "50"),
    "attacks": ("-m", "benchmarks.attacks"),
    "benchmarks": ("-m", "benchmarks", "--short"),
}
"""Arguments of Python for each part. Its own docstring says what it needs beyond the tests' environment."""


class PartRun(BaseModel):
    """The last run of a part."""

    model_config = ConfigDict(frozen=True)

    at: datetime
    commit: str
    passed: bool


_RUNS = TypeAdapter(dict[str, PartRun])


def read_runs() -> dict[str, PartRun]:
    """The last run of each part that has ever run."""
    return _RUNS.validate_json(RECORD.read_bytes()) if RECORD.exists() else {}


def overdue(runs: dict[str, PartRun], now: datetime) -> list[str]:
    """A line for each part that has not passed in the last week."""
    lines: list[str] = []
    for part in PARTS:
        run = runs.get(part)
        if run is None:
            lines.append(f"{part}: no run is recorded")
        elif not run.passed:
            lines.append(f"{part}: failed on {run.at:%Y-%m-%d} at {run.commit}")
        elif now - run.at > MAX_AGE:
            lines.append(f"{part}: last passed on {run.at:%Y-%m-%d} at {run.commit}")
    return lines


def _run(part: str) -> bool:
    sys.stdout.write(f"== {part}\n")
    sys.stdout.flush()
    passed = subprocess.run((sys.executable, *PARTS[part]), check=False).returncode == 0
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), check=True, capture_output=True, text=True
    ).stdout.strip()
    now = datetime.now(UTC).replace(microsecond=0)
    runs = {**read_runs(), part: PartRun(at=now, commit=commit, passed=passed)}
    record = {name: json.loads(runs[name].model_dump_json()) for name in PARTS if name in runs}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.long_parts", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument(
        "--warn", action="store_true", help="run nothing; name what has not passed for a week"
    )
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if arguments.warn:
        for line in overdue(read_runs(), datetime.now(UTC)):
            sys.stdout.write(f"WARNING: long tests, {line}\n")
        return
    failed = [part for part in arguments.parts or PARTS if not _run(part)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
