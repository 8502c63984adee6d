"""What a plug-in hangs on the episodes of one suite: a kind of suites may have more than tasks and servers.

A suite has the hooks of the first plug-in whose function in `Plugin.suites` makes some for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import TypeAlias

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

CallFilter: TypeAlias = Callable[[bytes, JsonObject], Awaitable[bytes]]
"""Makes the arguments that a tool gets, as JSON text, of the agent's arguments and the tool's input schema.
Raises nothing but cancellation."""
ToolDescriptions: TypeAlias = Mapping[str, tuple[JsonObject, ...]]
"""The tools (name, description, inputSchema) of each entry of `needed_local_tools` in `task_config.json`."""


class SuiteHooks:
    """What hangs on the episodes of one suite; each method has a default that does nothing."""

    def facts(self) -> JsonObject:
        """Members of the verdict that are the same for all episodes of the suite, see `Facts`."""
        return {}

    def call_filter(self, facts: Facts) -> CallFilter | None:
        """What changes the arguments of calls in an episode with these facts; None: nothing.

        The suite's local tools are called without it.
        """
        return None

    async def describe_local_tools(
        self, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The tools of the suite's own code that a task lists. Raises SetUpError."""
        return {}

    def local_server(self, descriptions: ToolDescriptions, root: PurePosixPath) -> JsonObject | None:
        """The SERVER object, for the driver's `start`, of the server that runs these local tools."""
        return None

    def evaluator_log(self, attempt: Attempt, task: Task, root: PurePosixPath) -> Iterable[bytes]:
        """The file of a closed attempt that its evaluator reads, in chunks that are the same every time.

        `root`: the suite's folder in the evaluator's sandbox. Empty: the evaluator gets no file, and so not
        the agent's answer. Iterating blocks.
        """
        return ()

    def files(self, attempt: Attempt, task: Task, verdict: Verdict) -> Mapping[str, Iterable[bytes]]:
        """Files for the folder of a graded episode, by name, in chunks. Iterating blocks."""
        return {}


def suite_hooks(suite: Suite) -> SuiteHooks:
    """The hooks of a suite. Raises SettingsError if its profile needs a plug-in that is not installed."""
    made = (load(part)(suite) for plugin in plugins() for part in plugin.suites)
    hooks = next((hooks for hooks in made if hooks is not None), None)
    profile = suite.profile
    if hooks is None and (profile.local_code or profile.coerces_arguments):
        raise SettingsError(
            f"suite {suite.name}: `local_code` and `coerces_arguments` need the plug-in toolathlon, "
            "which is not installed"
        )
    return hooks or SuiteHooks()
