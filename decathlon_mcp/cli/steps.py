"""The steps of an episode, each in a process of its own: a lobby's tool asked, its answer printed as JSON.

An episode outlives the connection that started it, so a step keeps nothing but its handle.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from decathlon_client import AtCapacityError, ClientError, Decathlon, OnProgress, Reply

from decathlon_mcp.cli.episode import StepError
from decathlon_mcp.types import as_object

NOT_UNDERSTOOD: Final = 2
TOOL_FAILED: Final = 3
NOT_PASSED: Final = 4
NO_VERDICT: Final = 5
TRY_AGAIN: Final = 75
"""`EX_TEMPFAIL` of sysexits.h."""


async def start(url: str, asked: Mapping[str, Any]) -> int:
    """Print what `start_episode` tells. Who interrupts the waiting has no handle, so the episode goes too."""
    reply = await _asked(url, "start_episode", asked)
    return _print(dict(reply.structured or {}))


async def ask(url: str, handle: str, tool: str) -> int:
    """Print what a tool of the lobby tells of an episode."""
    url, handle = _found(url, handle)
    reply = await _asked(url, tool, {"episode": handle})
    return _print(dict(reply.structured or {}))


async def call(url: str, handle: str, tool: str, arguments: str) -> int:
    """Print a tool's reply. Raises StepError for arguments that are no JSON object."""
    url, handle = _found(url, handle)
    given = _object(_text(arguments))
    reply = await _asked(url, "call_tool", {"episode": handle, "name": tool, "arguments": given})
    return _print(reply.raw, TOOL_FAILED if reply.is_error else 0)


async def claim(url: str, handle: str, answer: str | None, truncated: bool, turns: int | None) -> int:
    """Print what closing the attempt tells."""
    url, handle = _found(url, handle)
    words = sys.stdin.read() if answer == "-" else answer
    asked = {"episode": handle, "answer": words, "truncated": truncated or None, "turns": turns}
    reply = await _asked(url, "claim_done", asked)
    return _print(dict(reply.structured or {"text": reply.text}))


async def evaluate(url: str, handle: str) -> int:
    """Print the verdict; 0 only for an attempt that passed."""
    url, handle = _found(url, handle)
    reply = await _asked(url, "evaluate", {"episode": handle})
    verdict = reply.verdict
    if verdict is None:
        raise StepError(reply.text)
    passed = 0 if verdict.get("success") else NOT_PASSED
    return _print(verdict, passed if verdict.get("status") == "scored" else NO_VERDICT)


async def _asked(url: str, tool: str, arguments: Mapping[str, Any]) -> Reply:
    given = {name: value for name, value in arguments.items() if value is not None}
    async with _server(url) as server:
        return await server.ask(tool, given, on_progress=_telling())


@asynccontextmanager
async def _server(url: str) -> AsyncGenerator[Decathlon]:
    try:
        async with Decathlon(url, os.environ.get("DECATHLON_TOKEN") or None) as server:
            yield server
    except AtCapacityError as error:
        raise StepError(error.message, TRY_AGAIN) from None
    except ClientError as error:
        raise StepError(error.message) from None
    except ValueError as error:
        raise StepError(f"--url: {error}", NOT_UNDERSTOOD) from None


def _telling() -> OnProgress | None:
    """What takes long says so on stderr, to whoever sits there."""
    if not sys.stderr.isatty():
        return None

    async def tell(progress: float, total: float | None, message: str | None) -> None:
        share = f"{progress:g} of {total:g}" if total else f"{progress:g}"
        sys.stderr.write(f"decathlon-mcp: {message or 'under way'} ({share})\n")

    return tell


def _found(url: str, handle: str) -> tuple[str, str]:
    """Server and handle; of an episode's address both are its own."""
    if "://" not in handle:
        return url, handle
    root, found, rest = handle.partition("/episodes/")
    if not found or not urlsplit(root).netloc:
        raise StepError(f"neither an episode's handle nor its address: {handle!r}", NOT_UNDERSTOOD)
    return root, rest.partition("/")[0]


def _text(said: str) -> str:
    """Arguments as they were given: in words, `@FILE`, or `-` for stdin."""
    if said == "-":
        return sys.stdin.read()
    if not said.startswith("@"):
        return said
    try:
        return Path(said[1:]).read_text("utf-8")
    except OSError as error:
        raise StepError(f"{said[1:]}: {error.strerror}", NOT_UNDERSTOOD) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = as_object(json.loads(text))
    except ValueError as error:
        raise StepError(f"the arguments are not JSON: {error}", NOT_UNDERSTOOD) from None
    if value is None:
        raise StepError("the arguments must be a JSON object, such as '{}'", NOT_UNDERSTOOD)
    return value


def _print(value: Mapping[str, Any], status: int = 0) -> int:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    return status
