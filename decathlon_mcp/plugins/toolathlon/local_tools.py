"""Toolathlon's local tools: tools that a task lists besides its servers, run by the suite's own code.

They are the tools of a server `local` (`local_tools_server.py`), which is started when one of them
is first called: most attempts at most tasks never call any. Their descriptions come from the suite's own
code, which runs once in a sandbox for that purpose; they are kept as long as the suite is served.

Decided 2026-11-21: the server replaces openai-agents by a stub with the two classes that Toolathlon's tools
import. The real package takes 3.7 s to import on two slow cores; with the stub the tools' own imports take
0.1 s (`web_search`: 1.3 s). Describing all tools takes 0.7 s, of which 0.6 s are a bare `uv run python`; the
first call takes 1.5 s and later ones 0.3 s, nearly all of it in upstream's code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

import anyio

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.extensions import ToolDescriptions
from decathlon_mcp.errors import DriverError, SetUpError
from decathlon_mcp.payloads import source
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.suites.tool_names import LOCAL
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
