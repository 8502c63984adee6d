"""Runs a target under atheris for some minutes and reports executions, coverage and the last new coverage."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
_STATUS = re.compile(r"#(\d+)\s+(\w+)\s.*?cov: (\d+) ft: (\d+)")
_MAX_INPUT_BYTES = 4096
_STATUS_SECONDS = 60.0
MAX_CORPUS_BYTES = 512
"""Longest input that a run adds to the corpus."""


def main(module: str, target: Callable[[bytes], None], package: tuple[str, ...]) -> None:
    """The command line of a target: its name, its function, and the modules that coverage is measured in."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.worker:
        _work(target, package, rest)
    else:
        sys.exit(_watch(module, target, package, options.minutes))


def _work(target: Callable[[bytes], None], package: tuple[str, ...], arguments: list[str]) -> None:
    """Fuzz in this process, until libFuzzer ends it."""
    import atheris  # pyright: ignore  (see the package's docstring)

    for name in package:
        for function in vars(importlib.import_module(name)).values():
            if getattr(function, "__module__", None) != name:
                continue
            if isinstance(function, type):
                for key, member in list(vars(function).items()):
                    if callable(member) and hasattr(member, "__code__"):
                        setattr(function, key, atheris.instrument_func(member))  # pyright: ignore
            elif hasattr(function, "__code__"):
                atheris.instrument_func(function)  # pyright: ignore
    atheris.Setup([sys.argv[0], *arguments], target)  # pyright: ignore
    atheris.Fuzz()  # pyright: ignore


def _watch(module: str, target: Callable[[bytes], None], package: tuple[str, ...], minutes: float) -> int:
    """Run the worker and report; 0 unless an input violates a property."""
    seconds = minutes * 60
    seeds = CORPUS / module.rpartition(".")[2]
    seeds.mkdir(parents=True, exist_ok=True)
    started = last_new = last_report = time.monotonic()
    executions = coverage = features = first_coverage = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as found:
        command = [sys.executable, "-m", module, "--worker"]
        options = [f"-max_total_time={seconds:.0f}", f"-max_len={_MAX_INPUT_BYTES}", "-timeout=10"]
        options += ["-rss_limit_mb=2048", f"-artifact_prefix={found}/failed-", "-print_final_stats=1"]
        with subprocess.Popen(
            [*command, *options, found, str(seeds)], stderr=subprocess.PIPE, text=True, errors="replace"
        ) as worker:
            assert worker.stderr is not None
            for line in worker.stderr:
                match = _STATUS.search(line)
                if match is None:
                    if not line.startswith("INFO"):
                        print(line, end="")  # noqa: T201
                    continue
                executions, seen = int(match.group(1)), int(match.group(3))
                first_coverage = first_coverage or seen
                features = int(match.group(4))
                now = time.monotonic()
                if seen > coverage:
                    coverage, last_new = seen, now
                if now - last_report >= _STATUS_SECONDS:
                    last_report = now
                    _report(now - started, executions, first_coverage, coverage, features, now - last_new)
        now = time.monotonic()
        _report(now - started, executions, first_coverage, coverage, features, now - last_new)
        failed = list(Path(found).glob("failed-*"))
        for file in failed:
            print(f"failed: {file.name}: {file.read_bytes()!r}")  # noqa: T201
        if worker.returncode == 0:
            _minimise(target, package, Path(found), seeds)
    return int(bool(failed) or worker.returncode != 0)


def _report(
    seconds: float, executions: int, first: int, coverage: int, features: int, since_new: float
) -> None:
    print(  # noqa: T201
        f"{seconds:.0f} s: {executions} executions, coverage {first} -> {coverage} branches, "
        f"{features} features; last new branch {seconds - since_new:.0f} s after the start, "
        f"{since_new:.0f} s ago",
        flush=True,
    )


def _minimise(target: Callable[[bytes], None], package: tuple[str, ...], found: Path, seeds: Path) -> None:
    """Add to the corpus those inputs that reach new lines or new steps from line to line; it stays small."""
    seen: set[tuple[str, int, int]] = set()
    for file in seeds.iterdir():
        seen |= _steps(target, package, file.read_bytes())
    inputs = sorted((file.read_bytes() for file in found.iterdir()), key=len)
    added = 0
    for data in inputs:
        new = _steps(target, package, data) - seen
        if new and len(data) <= MAX_CORPUS_BYTES:
            seen |= new
            added += 1
            (seeds / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"{added} of {len(inputs)} inputs were added to the corpus {seeds.name}")  # noqa: T201


def _steps(
    target: Callable[[bytes], None], package: tuple[str, ...], data: bytes
) -> set[tuple[str, int, int]]:
    """The steps from line to line in the modules of a package that an input causes."""
    files = {str(sys.modules[name].__file__) for name in package}
    steps: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        last = 0

        def trace_line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            steps.add((frame.f_code.co_filename, last, frame.f_lineno))
            last = frame.f_lineno
            return trace_line

        return trace_line

    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return steps
