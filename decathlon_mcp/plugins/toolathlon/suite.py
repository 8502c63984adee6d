"""What Toolathlon hangs on the episodes of a suite, whose profile says which parts it uses, and its releases.

Toolathlon-Verified is upstream's repaired release of the same 108 tasks (2026-06-30,
https://toolathlon.xyz/docs/blog/toolathlon-verified). It changed 83 of them, so that rewards of one release
say little about the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
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
from decathlon_mcp.suites.checkout import git_output
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.prompts import LOCAL
from decathlon_mcp.suites.suite import Release, Suite
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


BEFORE = Release("before", "before Toolathlon-Verified")
VERIFIED = Release("verified", "Toolathlon-Verified or later")
UNKNOWN = Release("unknown", "unknown whether before or after Toolathlon-Verified")
VERIFIED_COMMIT = "d57361c0f1582cf9a0675c0753315bb6b004bd0e"
ROOT_COMMIT = "be334ecace50427432d4f53a097c837256ab1e28"
"""The first commit of upstream's history: a history that contains it has not been shortened."""
VERIFIED_TEXTS = "2afe3883779e05b30b900d0c355d05e0abd3f856ce7608434d8f410112e2c41c"
TEXTS_BEFORE = frozenset(
    {
        "798c477d7fb05740833c15a6ef3ffc8d37a0a46df6cb91b2ec236131e169151c",  # 500e3d86, 2025-10-28
        "8c69dc6d6f3314c96a0cc8be759f5643aef1d983665aa9fb18c86ebe13517472",  # fae857db, 2025-11-04
    }
)
TASKS = "tasks/finalpool"


def find_release(checkout: Path) -> Release:
    """The release of a checkout of Toolathlon: by its history, else by the texts of its tasks.

    Blocks: runs git. A fork with tasks of its own, whose history does not go back to upstream's, is
    UNKNOWN.
    """
    history = _history(checkout)
    if VERIFIED_COMMIT in history:
        return VERIFIED
    texts = texts_digest(checkout)
    # Before the history: a fork may have upstream's changes without its commits.
    if texts == VERIFIED_TEXTS:
        return VERIFIED
    return BEFORE if ROOT_COMMIT in history or texts in TEXTS_BEFORE else UNKNOWN


def texts_digest(checkout: Path) -> str:
    """A digest of the task texts in English, by task."""
    total = hashlib.sha256()
    for file in sorted((checkout / TASKS).glob("*/docs/task.md")):
        total.update(f"{file.parent.parent.name}\0".encode())
        try:
            total.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            continue  # reported where the task is read
    return total.hexdigest()


def _history(checkout: Path) -> frozenset[str]:
    """The commits that the checkout's commit is made of; empty without git."""
    if not (checkout / ".git").exists():
        return frozenset()
    return frozenset((git_output(checkout, "rev-list", "HEAD") or "").split())
