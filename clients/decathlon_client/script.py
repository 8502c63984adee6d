"""A script: the calls of one attempt, a JSON object a line, and the playing of it.

The bundled oracles are scripts; `demo` and `play --script` both play them here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import anyio

from decathlon_client import Episode
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.starter import CLAIM, Step, read_steps

STDIN = "-"
WORKSPACE = re.compile(r"(/\S+/workspace)\b")


class ScriptError(Exception):
    """A reply was not what the script expects."""


class Audience(Protocol):
    """Who is shown a script as it is played."""

    def call(self, tool: str, arguments: Mapping[str, Any]) -> None: ...

    def progress(self, progress: float, total: float | None, message: str | None) -> None: ...

    def reply(self, text: str, *, failed: bool = False) -> None: ...


async def read_script(file: str) -> list[Step]:
    """The steps in a file, or on stdin (`-`). Raises BadRequestError naming file and line."""
    name = "stdin" if file == STDIN else file
    try:
        text = sys.stdin.read() if file == STDIN else await anyio.Path(file).read_text("utf-8")
        return read_steps(text)
    except OSError as error:
        raise BadRequestError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise BadRequestError(f"{name}: {error}") from None


async def play_script(episode: Episode, steps: Sequence[Step], audience: Audience) -> None:
    """Make the calls, one after the other. A tool that fails is the attempt's affair, as it is an agent's.

    Raises ScriptError for a reply without what its step expects, ClientError for a call that cannot be made.
    """
    found = WORKSPACE.search(episode.prompt)
    workspace = found[1] if found else ""
    for step in steps:
        arguments = step.filled(workspace)
        audience.call(step.tool, arguments)

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            audience.progress(progress, total, message)

        if step.tool == CLAIM:
            reply = await episode.claim_done(arguments.get("answer"))
        else:
            reply = await episode.call(step.tool, arguments, on_progress=on_progress)
        audience.reply(reply.text, failed=reply.is_error)
        if step.expect is not None and step.expect not in reply.text:
            raise ScriptError(f"{step.tool} answered something else than the script expects: {step.expect!r}")
