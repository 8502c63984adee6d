"""Checks a suite where its tasks would run: its MCP servers' programs, its tasks' evaluators and rubrics."""

from __future__ import annotations

import io
import json
import secrets
import shutil
import struct
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from functools import partial
from pathlib import Path, PurePosixPath
from zoneinfo import ZoneInfo

import anyio
import anyio.to_thread
from pydantic import Base64Bytes, TypeAdapter, ValidationError

from decathlon_mcp.archives.unpacking import joined
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import MissingProgram
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.transfers import put_archive
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError, SuiteError
from decathlon_mcp.grading.grader import (
    CHECK_SECONDS,
    PYTHON_ENVIRONMENT,
    evaluator_module,
    probe_evaluators,
)
from decathlon_mcp.grading.rubric import FUNCTION_ARGUMENTS, Rubric, function_location, load_rubric
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.base import Finding
from decathlon_mcp.suites.checkout import walk, write
from decathlon_mcp.suites.suite import Suite

PROGRAMS_SECONDS = 20.0
FUNCTIONS_SECONDS = 60.0
"""For all functions of a suite: each is imported with what its module imports."""
AT_ONCE = 200
"""Functions or evaluators that one process looks at: their names are an argument, whose length is limited."""
OUTPUT_BYTES = 1 << 20
MAX_ERRORS = 8
"""Errors in rubrics that a finding shows."""
PAGES = {
    "evaluators": "docs/writing-tasks.md explains evaluators",
    "rubrics": "docs/rewards.md#dense-rewards explains rubrics",
}
_OUTPUT = TypeAdapter(dict[str, str])


ZONE_SCRIPT = """
import base64, json, os
name = os.environ.get("TZ", "").lstrip(":")
try:
    with open("/etc/localtime", "rb") as file:
        data = file.read(1 << 16)
except OSError:
    data = b""
print(json.dumps([name, base64.b64encode(data).decode()]))
"""
"""Prints the time zone of a sandbox: TZ, and the content of /etc/localtime (tzfile(5))."""
_ZONE = TypeAdapter(tuple[str, Base64Bytes])


def read_zone(output: str) -> tzinfo | None:
    """The time zone that `ZONE_SCRIPT` has printed; None if that cannot be read."""
    try:
        name, data = _ZONE.validate_json(output)
        if name:
            return ZoneInfo(name)
        return ZoneInfo.from_file(io.BytesIO(data)) if data else UTC
    except (ValueError, OSError, EOFError, IndexError, KeyError, struct.error):
        return None  # also ValidationError, and ZoneInfoNotFoundError, which is a KeyError


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderFinding(Finding):
    """The rubrics or the evaluators of one suite. `errors`: by the task's id."""

    suite: str
    errors: Mapping[str, SuiteError] = field(default_factory=dict[str, SuiteError])


async def probe_suite(
    factory: SandboxFactory, catalogue: Catalogue, *, can_open: bool
) -> AsyncGenerator[Finding]:
    """Check a suite in one sandbox without a network; its missing programs are recorded in the catalogue.

    `can_open`: whether a sandbox can be opened; otherwise only the files of rubrics are checked. If it fails,
    no program counts as missing, and no function as invalid.
    """
    suite = factory.suite
    rubrics, errors = await anyio.to_thread.run_sync(_read_rubrics, suite)
    functions = {task: rubric.function for task, rubric in rubrics.items() if rubric.function is not None}
    evaluators: dict[str, SuiteError] = {}
    if can_open:
        seconds = PROGRAMS_SECONDS + CHECK_SECONDS + (FUNCTIONS_SECONDS if functions else 0)
        problem = f"it took longer than {seconds:g} s"
        with anyio.move_on_after(seconds):
            try:
                evaluators, found = await _probe(factory, catalogue, functions)
                errors |= found
                problem = ""
            except (DecathlonError, OSError) as error:
                problem = str(error)
        if problem:
            yield Finding(
                f"sandbox of {suite.name}",
                False,
                f"could not look into a sandbox of {suite.name}: {problem}",
                "until that works, its MCP servers' programs and its rubrics' functions count as present",
                required=False,
            )
    if evaluators:
        yield _finding(suite, "evaluators", len(suite.tasks), evaluators)
    if rubrics or errors:
        yield _finding(suite, "rubrics", len(rubrics.keys() | errors.keys()), errors)


def _read_rubrics(suite: Suite) -> tuple[dict[str, Rubric], dict[str, SuiteError]]:
    """The rubrics of a suite's tasks, and the errors of invalid rubrics, by the task's id."""
    rubrics: dict[str, Rubric] = {}
    errors: dict[str, SuiteError] = {}
    for task in suite.tasks.values():
        try:
            if (rubric := load_rubric(suite, task)) is not None:
                rubrics[task.id] = rubric
        except SuiteError as error:
            errors[task.id] = error
    return rubrics, errors


def _finding(suite: Suite, what: str, count: int, errors: Mapping[str, SuiteError]) -> GraderFinding:
    lines = [error.message for error in errors.values()]
    shown = lines[:MAX_ERRORS] + ([f"{len(lines) - MAX_ERRORS} more"] if len(lines) > MAX_ERRORS else [])
    return GraderFinding(
        f"{what} of {suite.name}",
        not errors,
        "\n".join([f"{len(errors)} of {count} are invalid", *shown]) if errors else f"{count}",
        f"{PAGES[what]}; `decathlon-mcp tasks --check` names the tasks" if errors else "",
        required=False,
        suite=suite.name,
        errors=errors,
    )


async def _probe(
    factory: SandboxFactory, catalogue: Catalogue, functions: Mapping[str, str]
) -> tuple[dict[str, SuiteError], dict[str, SuiteError]]:
    """Record the missing programs; return the errors of evaluators and of functions by task.

    `functions` are given as `FILE:NAME`.
    """
    suite = factory.suite
    async with factory.open(f"look-{secrets.token_hex(6)}", "none") as (sandbox, driver):
        root = sandbox.root
        await put_archive(sandbox, driver, root, factory.common)
        result = await driver.run(
            probe_command(suite, root=root), cwd=str(root), timeout_seconds=PROGRAMS_SECONDS
        )
        where = f"the image {factory.image}" if factory.image else ""
        catalogue.record_missing_programs(suite, parse_missing_programs(suite, result.stdout, where))
        zone = await driver.run(
            [*suite.profile.python, "-c", ZONE_SCRIPT],
            cwd=str(root),
            env=dict(suite.profile.environment),
            timeout_seconds=PROGRAMS_SECONDS,
            output_bytes=OUTPUT_BYTES,
        )
        if (found := read_zone(zone.stdout)) is not None:
            catalogue.record_zone(suite, found)
        with tempfile.TemporaryDirectory(prefix="decathlon-evaluators-") as folder:
            archive = Path(folder) / "tasks.tar"
            await anyio.to_thread.run_sync(_pack_code, suite, archive)
            await put_archive(sandbox, driver, root, archive)
            archive.unlink()
            names = [name for name, task in suite.tasks.items() if not task.errors]
            evaluators: dict[str, str] = {}
            for some in _groups(names):
                modules = {name: evaluator_module(suite.tasks[name]) for name in some}
                found_problems = await probe_evaluators(driver, suite.profile, root, modules)
                evaluators |= {name: found_problems[name] for name in some if name in found_problems}
            imports: dict[str, str] = {}
            if functions:
                files = {name: Path(folder) / f"{number}.tar" for number, name in enumerate(functions)}
                for name, file in files.items():
                    task = suite.tasks[name]
                    await anyio.to_thread.run_sync(partial(suite.task_archive, task, file, sealed=True))
                parts = [(PurePosixPath(), file) for file in files.values()]
                await put_archive(sandbox, driver, root, joined(parts))
            for some in _groups(list(functions)):
                group = {name: functions[name] for name in some}
                imports |= await _import_functions(suite, group, driver, root)
    return (
        {name: _broken(suite, name, f"the evaluator: {problem}") for name, problem in evaluators.items()},
        {
            name: _broken(
                suite,
                name,
                f"the rubric's function {functions[name]}: {problem}",
                functions[name].partition(":")[0],
            )
            for name, problem in imports.items()
            if name in functions
        },
    )


def _groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))


def _broken(suite: Suite, task: str, problem: str, file: str = "") -> SuiteError:
    folder = suite.path / suite.tasks[task].folder
    return SuiteError(f"{folder}: {problem}", file=str(folder / file))


def _pack_code(suite: Suite, archive: Path) -> None:
    """The Python files of all tasks: a task's data can be large."""
    folders = [task.folder for task in suite.tasks.values()]
    members = [path for folder in folders for path in walk(suite.path, folder) if path.suffix == ".py"]
    write(archive, suite.path, members, {})


async def _import_functions(
    suite: Suite, functions: Mapping[str, str], driver: DriverClient, root: PurePosixPath
) -> dict[str, str]:
    """Problems of functions that cannot be called in a sandbox with their tasks' files, by task."""
    order = {
        "root": str(root),
        "functions": {name: function_location(suite.tasks[name], functions[name]) for name in functions},
        "arguments": FUNCTION_ARGUMENTS,
    }
    result = await driver.run(
        [*suite.profile.python, "-c", source("rubric_probe", __package__), json.dumps(order)],
        cwd=str(root),
        env={**PYTHON_ENVIRONMENT, **dict(suite.profile.environment)},
        timeout_seconds=FUNCTIONS_SECONDS,
    )
    try:
        return _OUTPUT.validate_json(result.stdout)
    except ValidationError:
        raise SuiteError(
            "a rubric's function ended the program that imported it: "
            f"{result.stderr.strip()[-500:] or f'exit code {result.exit_code}'}"
        ) from None


VISIBLE = (
    "install it below /usr/local or in the environment of the server's Python, put it into the checkout's "
    "local_servers, or choose `--isolation none`"
)
"""What to do about a program that sandboxes in namespaces do not see."""
_PROBE_OUTPUT = TypeAdapter(dict[str, tuple[str, bool]])


def probe_command(suite: Suite, *, root: PurePosixPath) -> list[str]:
    """A command that, run in one of the suite's sandboxes, prints which MCP servers' programs are missing.

    `root` is the suite's root in that sandbox.
    """
    servers = {
        spec["name"]: {
            "command": spec["command"],
            "args": spec["args"],
            "paths": suite.servers[spec["name"]].absolute_paths,
        }
        for spec in suite.all_server_specs(root=root)
    }
    folders = (suite.profile.local_servers, suite.profile.local_binaries)
    order = {"root": str(root), "own": [f"{root / folder}/" for folder in folders], "servers": servers}
    return ["python3", "-c", source("program_probe", __package__), json.dumps(order)]


def parse_missing_programs(suite: Suite, output: str, where: str) -> Mapping[str, MissingProgram]:
    """The missing programs by MCP server, from the output of `probe_command`.

    `where`: the image that was looked through, as `the image NAME`; empty for the files of this machine, of
    which a sandbox may see a part only. Raises SuiteError for any other output.
    """
    try:
        programs = _PROBE_OUTPUT.validate_json(output)
    except ValidationError:
        raise SuiteError("the check for the servers' programs printed no result") from None
    looked = f"in {where}" if where else "on this machine"
    cure = f"looked for {looked}; install it there, or name another with --image"
    missing: dict[str, MissingProgram] = {}
    for name, (description, downloadable) in programs.items():
        place = "" if where else _place_here(suite, name, description)
        missing[name] = MissingProgram(
            description, downloadable, f"{place}; {VISIBLE}" if place else cure, bool(place)
        )
    return missing


def _place_here(suite: Suite, server: str, description: str) -> str:
    """Where this machine has the program or file of a description by the probe; empty if it does not."""
    config = suite.servers.get(server)
    for text in () if config is None else (config.command, *config.absolute_paths):
        if description in (f"the program {text}", f"the file {text}"):
            found = shutil.which(text) or (text if Path(text).exists() else None)
            return "" if found is None else f"this machine has it at {found}"
    return ""
