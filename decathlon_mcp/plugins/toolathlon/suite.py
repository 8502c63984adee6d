"""What Toolathlon hangs on the episodes of a suite, whose profile says which parts it uses."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

import anyio

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.extensions import CallFilter, SuiteHooks, ToolDescriptions
from decathlon_mcp.errors import DriverError, SetUpError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.toolathlon.coercion import coerced_arguments
from decathlon_mcp.plugins.toolathlon.traj_log import TrajectoryLog, eval_res
from decathlon_mcp.storage.kept_files import indented
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.prompts import LOCAL
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject, as_object

OUTPUT_TAIL = 2000
"""Characters of a failed command's stderr that an error message quotes."""


@dataclass(slots=True)
class LocalTools:
    """Definitions of one suite's local tools; each is read from the suite's code once and kept in `known`."""

    profile: SuiteProfile
    known: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict[str, tuple[JsonObject, ...]])
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    async def describe(
        self, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The definitions of a task's local tools. Raises SetUpError if the suite's code fails."""
        needs = [need for need in task.needs.local_tools if need in dict(self.profile.local_code)]
        async with self._lock:
            if unknown := [need for need in needs if need not in self.known]:
                self.known.update(await _describe(self.profile, unknown, driver, root, timeout_seconds))
        return {need: self.known[need] for need in needs}


async def _describe(
    profile: SuiteProfile,
    needs: Collection[str],
    driver: DriverClient,
    root: PurePosixPath,
    timeout_seconds: float,
) -> ToolDescriptions:
    try:
        result = await driver.run(
            _command(profile, needs, root, {}),
            cwd=str(root),
            env=dict(profile.environment),
            timeout_seconds=timeout_seconds,
            channel=True,
        )
    except DriverError as error:
        cause = error.message
    else:
        if result.exit_code == 0:
            try:
                described = as_object(json.loads(result.channel or "")) or {}
            except ValueError:
                described = {}
            faulty = [need for need in needs if not _are_tools(described.get(need))]
            if not faulty:
                return {need: tuple(described[need]) for need in needs}
            cause = f"the suite's code gave no tools for {faulty[0]}"
        else:
            cause = result.stderr.strip()[-OUTPUT_TAIL:] or "it took too long"
    raise SetUpError(f"the local tools {', '.join(needs)} could not be described: {cause}")


def local_server(profile: SuiteProfile, descriptions: ToolDescriptions, root: PurePosixPath) -> JsonObject:
    """The SERVER object for the driver's `start`."""
    # No `request_seconds`: the tools have time limits of their own.
    program, *arguments = _command(profile, descriptions, root, {"tools": descriptions})
    return {
        "name": LOCAL,
        "command": program,
        "args": arguments,
        "env": dict(profile.environment),
        "inherit": "all",
        "cwd": str(root),
    }


def _command(
    profile: SuiteProfile, needs: Collection[str], root: PurePosixPath, extra: Mapping[str, Any]
) -> list[str]:
    """The command that describes these tools on a channel or, with their `tools`, serves them."""
    code, workspace = dict(profile.local_code), str(root / profile.workspace)
    order = {"workspace": workspace, "code": {need: code[need] for need in needs}, **extra}
    return [*profile.python, "-c", source("local_tools_server", __package__), json.dumps(order)]


def _are_tools(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool.get("name"), str) and as_object(tool.get("inputSchema")) is not None
        for tool in (as_object(item) or {} for item in cast("list[Any]", value))
    )


class ToolathlonHooks(SuiteHooks):
    """Toolathlon's part of the episodes of one suite."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self.local_tools = LocalTools(suite.profile)

    def facts(self) -> JsonObject:
        """Verdicts say whether arguments were coerced."""
        return {"coerced_arguments": self._suite.profile.coerces_arguments}

    def call_filter(self, facts: Facts) -> CallFilter | None:
        """Arguments are coerced in an episode whose facts say so."""
        return coerced_arguments if facts.coerced_arguments else None

    async def describe_local_tools(
        self, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The definitions of a task's local tools. Raises SetUpError if the suite's code fails."""
        return await self.local_tools.describe(task, driver, root=root, timeout_seconds=timeout_seconds)

    def local_server(self, descriptions: ToolDescriptions, root: PurePosixPath) -> JsonObject:
        """The server that runs the suite's own code."""
        return local_server(self._suite.profile, descriptions, root)

    def evaluator_log(self, attempt: Attempt, task: Task, root: PurePosixPath) -> Iterable[bytes]:
        """`traj_log.json`, as evaluators get it."""
        return TrajectoryLog(attempt, suite=self._suite, task=task, root=root)

    def files(self, attempt: Attempt, task: Task, verdict: Verdict) -> Mapping[str, Iterable[bytes]]:
        """The files of a graded episode that Toolathlon's viewer (vis_traj) shows."""
        profile = self._suite.profile
        return {
            "traj_log.json": self.evaluator_log(attempt, task, profile.root),
            "eval_res.json": (indented(eval_res(attempt, profile, verdict)),),
        }
