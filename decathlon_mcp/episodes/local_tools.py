"""What a suite's local tools are called and take, in the words of the suite's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import anyio

from decathlon_mcp.errors import DriverError, SetUpError, SuiteError
from decathlon_mcp.link import Link
from decathlon_mcp.model import JsonObject
from decathlon_mcp.suites import Dialect, Suite, Task
from decathlon_mcp.suites.local_tools import Described, describe_command, known_needs, parse_described

OUTPUT_TAIL = 2000


@dataclass(slots=True)
class LocalTools:
    """Those known of one suite: asked for in the first sandbox that needs them, then kept."""

    known: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict[str, tuple[JsonObject, ...]])
    _asking: anyio.Lock = field(default_factory=anyio.Lock)

    async def of(
        self, suite: Suite, task: Task, link: Link, *, root: PurePosixPath, timeout_seconds: float
    ) -> Described:
        """The local tools of a task. Raises SetUpError where the suite's code does not tell them."""
        needs = known_needs(suite.dialect, task.needs.local_tools)
        async with self._asking:
            unknown = [need for need in needs if need not in self.known]
            if unknown:
                self.known.update(await _ask(suite.dialect, unknown, link, root, timeout_seconds))
        return {need: self.known[need] for need in needs}


async def _ask(
    dialect: Dialect, needs: Sequence[str], link: Link, root: PurePosixPath, timeout_seconds: float
) -> Described:
    try:
        result = await link.run(
            describe_command(dialect, needs, root),
            cwd=str(root),
            env=dict(dialect.environment),
            timeout_seconds=timeout_seconds,
            channel=True,
        )
        if result.exit_code == 0:
            return parse_described(result.channel or "", needs)
        cause = result.stderr.strip()[-OUTPUT_TAIL:] or "it took too long"
    except (DriverError, SuiteError) as error:
        cause = error.message
    raise SetUpError(f"the local tools {', '.join(needs)} could not be described: {cause}")
