"""Toolathlon's local tools: those a task names beside its servers, run by the suite's own code.

They are the tools of a server `local` of ours (`local_server.py`) that is started when one is first called:
most attempts at most tasks never do. What they are called and take is told beforehand by the suite's code
itself, asked once in a sandbox and kept for as long as the suite is served.

Decided 2026-11-21: Toolathlon's import openai-agents for the names of two classes: 3.7 s on two slow
cores; with a stand-in for these the tools' own imports took 0.1 s (`web_search`: 1.3 s). Asking took 0.7 s in
all, of which 0.6 s a bare `uv run python`; the first call 1.5 s, later ones 0.3 s, nearly all upstream's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, TypeAlias, cast

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.tool_names import LOCAL
from decathlon_mcp.types import JsonObject, as_object

Described: TypeAlias = Mapping[str, tuple[JsonObject, ...]]
"""The tools (name, description, inputSchema) behind each need of a task, as `task_config.json` names it."""


def known_needs(profile: SuiteProfile, needed: Collection[str]) -> tuple[str, ...]:
    """Those of a task's local tools that the suite has code for, in the task's order."""
    code = dict(profile.local_code)
    return tuple(need for need in needed if need in code)


def describe_command(profile: SuiteProfile, needs: Collection[str], root: PurePosixPath) -> list[str]:
    """What tells, over the channel, which tools these needs are. Run in `root`."""
    return _command(profile, needs, root, {})


def parse_described(channel: str, needs: Collection[str]) -> Described:
    """What `describe_command` wrote. Raises SuiteError where that is nothing of the kind."""
    try:
        said = as_object(json.loads(channel)) or {}
    except ValueError:
        said = {}
    described: dict[str, tuple[JsonObject, ...]] = {}
    for need in needs:
        tools = said.get(need)
        if not isinstance(tools, list) or not all(_is_tool(tool) for tool in cast("list[Any]", tools)):
            raise SuiteError(f"the suite's code gave no tools for {need}")
        described[need] = tuple(cast("list[JsonObject]", tools))
    return described


def local_spec(profile: SuiteProfile, described: Described, root: PurePosixPath) -> JsonObject:
    """The SERVER object of the wire's `start`. No time-out of ours: the tools have their own."""
    program, *arguments = _command(profile, described, root, {"tools": described})
    return {
        "name": LOCAL,
        "type": "stdio",
        "command": program,
        "args": arguments,
        "env": dict(profile.environment),
        "inherit": "all",
        "cwd": str(root),
    }


def _command(
    profile: SuiteProfile, needs: Collection[str], root: PurePosixPath, more: Mapping[str, Any]
) -> list[str]:
    code = dict(profile.local_code)
    order = {
        "workspace": str(root / profile.workspace),
        "code": {need: code[need] for need in needs},
        **more,
    }
    return [*profile.python, "-c", _source(), json.dumps(order)]


def _is_tool(value: object) -> bool:
    tool = as_object(value)
    return (
        tool is not None
        and isinstance(tool.get("name"), str)
        and as_object(tool.get("inputSchema")) is not None
    )


@cache
def _source() -> str:
    return resources.files("decathlon_mcp.payloads").joinpath("local_tools_server.py").read_text("utf-8")
