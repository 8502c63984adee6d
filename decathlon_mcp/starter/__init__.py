"""The bundled suite: small real tasks in Toolathlon's layout that need no network, account or container.

`suite/` is the checkout. `oracles/` holds a script per task that solves it with the task's MCP tools; it is
outside the checkout, so that no solution is ever copied into a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from decathlon_mcp.errors import UnknownTaskError

__all__ = ["CLAIM", "Step", "oracle", "oracle_ids", "read_steps", "suite_path"]

CLAIM = "claim_done"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a scripted player.

    `tool` is spelled `server__tool`, or `claim_done` for the last step. Strings in `arguments` may hold
    `{workspace}`, to be filled with the workspace's absolute path. `expect` must occur in the reply's text.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expect: str | None = None

    def filled(self, workspace: str) -> dict[str, Any]:
        """The arguments as they are to be sent."""
        return {name: _fill(value, workspace) for name, value in self.arguments.items()}


def suite_path() -> Path:
    """Return the path of the bundled checkout."""
    return _HERE / "suite"


def oracle_ids() -> list[str]:
    """Return the ids of the tasks that have a script, sorted."""
    return sorted(path.stem for path in (_HERE / "oracles").glob("*.jsonl"))


def oracle(task_id: str) -> list[Step]:
    """Return the steps that solve a task, the claim last. Raises UnknownTaskError if there is no script."""
    known = oracle_ids()
    if task_id not in known:
        raise UnknownTaskError(f"The starter suite has no task {task_id!r}", near=known)
    return read_steps((_HERE / "oracles" / f"{task_id}.jsonl").read_text("utf-8"))


def read_steps(text: str) -> list[Step]:
    """The steps of a script, a line each: `{"tool": ..., "arguments": {...}, "expect": ...}`, or
    `{"claim_done": {...}}`.

    Arguments and what is expected may be left out, lines may be empty. Raises ValueError naming the line.
    """
    steps: list[Step] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                steps.append(_step(json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: not JSON: {error.msg} at column {error.colno}") from None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return steps


def _step(line: object) -> Step:
    step = cast("dict[str, Any]", line) if isinstance(line, dict) else {}
    if strange := set(step).difference(("tool", "arguments", "expect"), (CLAIM,)):
        raise ValueError(f"there is nothing called {', '.join(sorted(strange))} in a step")
    if (CLAIM in step) == ("tool" in step):
        raise ValueError(f'a step is {{"tool": NAME, "arguments": {{...}}}} or {{"{CLAIM}": {{...}}}}')
    tool = CLAIM if CLAIM in step else step["tool"]
    arguments: object = step.get(CLAIM if CLAIM in step else "arguments") or {}
    expect: object = step.get("expect")
    if not isinstance(tool, str) or not isinstance(arguments, dict):
        raise ValueError("a tool is named by a text, and its arguments are an object")  # noqa: TRY004
    if expect is not None and not isinstance(expect, str):
        raise ValueError("what is expected is a text")
    return Step(tool, cast("dict[str, Any]", arguments), expect)


def _fill(value: Any, workspace: str) -> Any:
    if isinstance(value, str):
        return value.replace("{workspace}", workspace)
    if isinstance(value, list):
        return [_fill(item, workspace) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _fill(item, workspace) for name, item in cast("dict[str, Any]", value).items()}
    return value
