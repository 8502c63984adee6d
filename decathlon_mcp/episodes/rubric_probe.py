"""Checks the rubrics of a suite before anybody plays: their files, and in a sandbox their functions."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.driver_client.archives import put_archive
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError, SuiteError
from decathlon_mcp.grading.grader import PYTHON_ENVIRONMENT
from decathlon_mcp.grading.rubric import FUNCTION_ARGUMENTS, Rubric, function_location, load_rubric
from decathlon_mcp.payloads import source
from decathlon_mcp.suites.suite import Suite

PROBE_SECONDS = 60.0
AT_ONCE = 200
"""Functions that one process imports: their names are an argument, whose length is limited."""
_OUTPUT = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class RubricCheck:
    """The rubrics of one suite: how many there are, and the errors by the task's id.

    `unchecked`: why their functions could not be imported in a sandbox; empty if they were.
    """

    count: int
    errors: Mapping[str, SuiteError]
    unchecked: str = ""


def read_rubrics(suite: Suite) -> tuple[dict[str, Rubric], dict[str, SuiteError]]:
    """The rubrics of a suite's tasks and the errors of those that are invalid, by the task's id."""
    rubrics: dict[str, Rubric] = {}
    errors: dict[str, SuiteError] = {}
    for task in suite.tasks.values():
        try:
            if (rubric := load_rubric(suite, task)) is not None:
                rubrics[task.id] = rubric
        except SuiteError as error:
            errors[task.id] = error
    return rubrics, errors


async def check_rubrics(suite: Suite, sandbox_factory: SandboxFactory | None) -> RubricCheck:
    """Check the rubrics of all tasks. Their functions are imported in one sandbox, if there is a factory."""
    rubrics, errors = await anyio.to_thread.run_sync(read_rubrics, suite)
    functions = {task: rubric.function for task, rubric in rubrics.items() if rubric.function is not None}
    count, unchecked = len(rubrics) + len(errors), ""
    if functions and sandbox_factory is not None:
        unchecked = f"it took longer than {PROBE_SECONDS:g} s"
        with anyio.move_on_after(PROBE_SECONDS):
            try:
                errors |= await _import_functions(suite, functions, sandbox_factory)
                unchecked = ""
            except DecathlonError as error:
                unchecked = error.message
    return RubricCheck(count, errors, unchecked)


async def _import_functions(
    suite: Suite, functions: Mapping[str, str], sandbox_factory: SandboxFactory
) -> dict[str, SuiteError]:
    """Import the functions, given as `FILE:NAME` by task. Raises DecathlonError if that is not possible."""
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="decathlon-rubrics-") as folder:
        archive = Path(folder) / "tasks.tar"
        await anyio.to_thread.run_sync(_pack, suite, list(functions), archive)
        async with sandbox_factory.open(f"look-{secrets.token_hex(6)}", "none") as (sandbox, driver):
            await put_archive(sandbox, driver, sandbox.root, sandbox_factory.common)
            await put_archive(sandbox, driver, sandbox.root, archive)
            names = list(functions)
            for start in range(0, len(names), AT_ONCE):
                order = {
                    "root": str(sandbox.root),
                    "functions": {
                        name: function_location(suite.tasks[name], functions[name])
                        for name in names[start : start + AT_ONCE]
                    },
                    "arguments": FUNCTION_ARGUMENTS,
                }
                result = await driver.run(
                    [*suite.profile.python, "-c", source("rubric_probe"), json.dumps(order)],
                    cwd=str(sandbox.root),
                    env={**PYTHON_ENVIRONMENT, **dict(suite.profile.environment)},
                    timeout_seconds=PROBE_SECONDS,
                )
                try:
                    problems |= _OUTPUT.validate_json(result.stdout)
                except ValidationError:
                    raise SuiteError(
                        "a rubric's function ended the program that imported it: "
                        f"{result.stderr.strip()[-500:] or f'exit code {result.exit_code}'}"
                    ) from None
    return {
        name: SuiteError(
            f"{suite.path / suite.tasks[name].folder}: the rubric's function {functions[name]}: {problem}",
            file=str(suite.path / suite.tasks[name].folder / functions[name].partition(":")[0]),
        )
        for name, problem in problems.items()
        if name in functions
    }


def _pack(suite: Suite, tasks: list[str], archive: Path) -> None:
    for name in tasks:
        suite.task_archive(suite.tasks[name], archive, sealed=True)
