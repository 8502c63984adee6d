"""Scripts: the tool calls of one attempt as JSON lines, and playing them without a model.

The solutions of the bundled tasks are scripts; the commands `demo` and `play --script` play them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import anyio

from decathlon_client.client_episode import Episode
from decathlon_client.client_errors import ClientError
from decathlon_client.client_values import CLAIM

STDIN = "-"
WORKSPACE = re.compile(r"(/\S+/workspace)\b")
"""The workspace's absolute path, which only the prompt tells."""


class ScriptError(ClientError):
    """A script could not be read, or a reply was not what the script expects."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a script.

    `tool` is spelled `server__tool`, or `claim_done` for the last step. Strings in `arguments` may contain
    `{workspace}`, which stands for the workspace's absolute path. The reply's text must contain `expect`.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expect: str | None = None

    def resolve(self, workspace: str) -> dict[str, Any]:
        """The arguments to send, with `{workspace}` replaced."""
        return {name: _replace(value, workspace) for name, value in self.arguments.items()}


def workspace_in(*texts: str) -> str:
    """The workspace's absolute path, from the first of the texts that tells it; empty if none does."""
    return next((match[1] for text in texts if (match := WORKSPACE.search(text))), "")


class ScriptDisplay(Protocol):
    """Shows a script while it is played."""

    def call(self, tool: str, arguments: Mapping[str, Any]) -> None: ...

    def progress(self, progress: float, total: float | None, message: str | None) -> None: ...

    def reply(self, text: str, *, failed: bool = False) -> None: ...


def read_steps(text: str) -> list[Step]:
    """Parse a script, one step per line: `{"tool": ..., "arguments": {...}, "expect": ...}` or
    `{"claim_done": {...}}`.

    `arguments` and `expect` are optional; empty lines are skipped. Raises ValueError naming the line.
    """
    steps: list[Step] = []
    # Not `splitlines`, which also splits at characters that JSON allows in a string, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                steps.append(_step(json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: not JSON: {error.msg} at column {error.colno}") from None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return steps


async def read_script(file: str) -> list[Step]:
    """Read the script in a file, or on stdin (`-`). Raises ScriptError naming file and line."""
    name = "stdin" if file == STDIN else file
    try:
        text = sys.stdin.read() if file == STDIN else await anyio.Path(file).read_text("utf-8")
        return read_steps(text)
    except OSError as error:
        raise ScriptError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise ScriptError(f"{name}: {error}") from None


async def play_script(episode: Episode, steps: Sequence[Step], display: ScriptDisplay) -> None:
    """Make the calls in order. A tool that fails does not end the script, as it would not stop an agent.

    Raises ScriptError for a reply without its step's `expect`, ClientError for a call that cannot be made.
    """
    workspace = workspace_in(episode.prompt)

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        display.progress(progress, total, message)

    for step in steps:
        arguments = step.resolve(workspace)
        display.call(step.tool, arguments)
        if step.tool == CLAIM:
            # The episode knows how this server spells the tool's name.
            reply = await episode.claim_done(arguments.get("answer"))
        else:
            reply = await episode.call(step.tool, arguments, on_progress=on_progress)
        display.reply(reply.text, failed=reply.is_error)
        if step.expect is not None and step.expect not in reply.text:
            raise ScriptError(f"{step.tool} answered something else than the script expects: {step.expect!r}")


def _step(line: object) -> Step:
    step = cast("dict[str, Any]", line) if isinstance(line, dict) else {}
    if unknown := set(step).difference(("tool", "arguments", "expect"), (CLAIM,)):
        raise ValueError(f"a step has no member {', '.join(sorted(unknown))}")
    if (CLAIM in step) == ("tool" in step):
        raise ValueError(f'a step is {{"tool": NAME, "arguments": {{...}}}} or {{"{CLAIM}": {{...}}}}')
    tool = CLAIM if CLAIM in step else step["tool"]
    arguments: object = step.get(CLAIM if CLAIM in step else "arguments") or {}
    expect: object = step.get("expect")
    if not isinstance(tool, str) or not isinstance(arguments, dict):
        raise ValueError("`tool` must be a string, and `arguments` an object")  # noqa: TRY004
    if expect is not None and not isinstance(expect, str):
        raise ValueError("`expect` must be a string")
    return Step(tool, cast("dict[str, Any]", arguments), expect)


def _replace(value: Any, workspace: str) -> Any:
    if isinstance(value, str):
        return value.replace("{workspace}", workspace)
    if isinstance(value, list):
        return [_replace(item, workspace) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _replace(item, workspace) for name, item in cast("dict[str, Any]", value).items()}
    return value
