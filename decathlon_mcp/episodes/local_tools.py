"""What a suite's local tools are called and take, in the words of the suite's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import anyio

from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.errors import DriverError, SetUpError, SuiteError
from decathlon_mcp.suites.local_tools import (
    ToolDescriptions,
    describe_command,
    known_needs,
    parse_descriptions,
)
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

OUTPUT_TAIL = 2000


@dataclass(slots=True)
class LocalTools:
    """Those known of one suite: asked for in the first sandbox that needs them, then kept."""

    known: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict[str, tuple[JsonObject, ...]])
    _asking: anyio.Lock = field(default_factory=anyio.Lock)

    async def of(
        self, suite: Suite, task: Task, driver: DriverClient, *, root: PurePosixPath, timeout_seconds: float
    ) -> ToolDescriptions:
        """The local tools of a task. Raises SetUpError where the suite's code does not tell them."""
        needs = known_needs(suite.profile, task.needs.local_tools)
        async with self._asking:
            unknown = [need for need in needs if need not in self.known]
            if unknown:
                self.known.update(await _ask(suite.profile, unknown, driver, root, timeout_seconds))
        return {need: self.known[need] for need in needs}


async def _ask(
    profile: SuiteProfile,
    needs: Sequence[str],
    driver: DriverClient,
    root: PurePosixPath,
    timeout_seconds: float,
) -> ToolDescriptions:
    try:
        result = await driver.run(
            describe_command(profile, needs, root),
            cwd=str(root),
            env=dict(profile.environment),
            timeout_seconds=timeout_seconds,
            channel=True,
        )
        if result.exit_code == 0:
            return parse_descriptions(result.channel or "", needs)
        cause = result.stderr.strip()[-OUTPUT_TAIL:] or "it took too long"
    except (DriverError, SuiteError) as error:
        cause = error.message
    raise SetUpError(f"the local tools {', '.join(needs)} could not be described: {cause}")
