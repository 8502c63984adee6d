"""Toolathlon's local tools: tools that a task lists besides its servers, run by the suite's own code.

They are the tools of a server `local` (`payloads/local_tools_server.py`), which is started when one of them
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
from pathlib import PurePosixPath
from typing import Any, TypeAlias, cast

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.payloads import source
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.tool_names import LOCAL
from decathlon_mcp.types import JsonObject, as_object

ToolDescriptions: TypeAlias = Mapping[str, tuple[JsonObject, ...]]
"""The tools (name, description, inputSchema) of each entry of `needed_local_tools` in `task_config.json`."""


def known_needs(profile: SuiteProfile, needed: Collection[str]) -> tuple[str, ...]:
    """The entries among `needed` that the suite has code for, in the same order."""
    code = dict(profile.local_code)
    return tuple(need for need in needed if need in code)


def describe_command(profile: SuiteProfile, needs: Collection[str], root: PurePosixPath) -> list[str]:
    """The command that writes the descriptions of these tools to a channel. It runs in `root`."""
    return _command(profile, needs, root, {})


def parse_descriptions(channel: str, needs: Collection[str]) -> ToolDescriptions:
    """Read the channel of `describe_command`. Raises SuiteError if a description is missing or invalid."""
    try:
        content = as_object(json.loads(channel)) or {}
    except ValueError:
        content = {}
    descriptions: dict[str, tuple[JsonObject, ...]] = {}
    for need in needs:
        tools = content.get(need)
        if not isinstance(tools, list) or not all(_is_tool(tool) for tool in cast("list[Any]", tools)):
            raise SuiteError(f"the suite's code gave no tools for {need}")
        descriptions[need] = tuple(cast("list[JsonObject]", tools))
    return descriptions


def local_spec(profile: SuiteProfile, descriptions: ToolDescriptions, root: PurePosixPath) -> JsonObject:
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
    code = dict(profile.local_code)
    order = {
        "workspace": str(root / profile.workspace),
        "code": {need: code[need] for need in needs},
        **extra,
    }
    return [*profile.python, "-c", source("local_tools_server"), json.dumps(order)]


def _is_tool(value: object) -> bool:
    tool = as_object(value)
    return (
        tool is not None
        and isinstance(tool.get("name"), str)
        and as_object(tool.get("inputSchema")) is not None
    )
