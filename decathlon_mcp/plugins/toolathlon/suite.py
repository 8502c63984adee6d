"""What Toolathlon hangs on the episodes of a suite, whose profile says which parts it uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.extensions import CallFilter, SuiteHooks, ToolDescriptions
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.plugins.toolathlon.coercion import coerced_arguments
from decathlon_mcp.plugins.toolathlon.local_tools import LocalTools, local_server
from decathlon_mcp.plugins.toolathlon.traj_log import TrajectoryLog, eval_res
from decathlon_mcp.storage.kept_files import indented
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject


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
