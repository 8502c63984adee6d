"""`episode`: play an episode of a running server from a shell, one process per step.

An episode outlives the connection that started it, so a step needs only its handle. Each step calls one tool
of the lobby and prints the reply as one JSON value on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import quote, urlsplit

import anyio
from cyclopts import App, Group, Parameter

from decathlon_mcp.cli.options import Flag, Labels
from decathlon_mcp.cli.output import print_json
from decathlon_mcp.cli.usage import report
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.settings import default_state
from decathlon_mcp.types import HANDLE, as_object

if TYPE_CHECKING:
    from decathlon_client import Decathlon, OnProgress, Reply


USAGE_ERROR: Final = 2
TOOL_FAILED: Final = 3
NOT_PASSED: Final = 4
NO_VERDICT: Final = 5
AT_CAPACITY: Final = 75
"""`EX_TEMPFAIL` of sysexits.h: trying again later can help."""

MAX_STARTS = 256
"""Episodes of one server that `list` can show without a token."""
SERVER = Group("Server", sort_key=1)
EPILOGUE = (
    "Prints one JSON value on stdout. Reads the token from DECATHLON_TOKEN. Exit status: 0 success "
    "(`evaluate`: passed), 1 error, 2 usage error, 3 the tool failed, 4 the attempt did not pass, "
    "5 no verdict, 75 the server is full: try again later."
)

Url = Annotated[
    str | None,
    Parameter(
        group=SERVER,
        metavar="URL",
        help="The server's URL; ignored if EPISODE is a full address. [`DECATHLON_URL`, else http://127.0.0.1:8765]",
    ),
]
Handle = Annotated[
    str, Parameter(name="EPISODE", help="The `episode` value that `start` printed, or the full address.")
]

episode = App(
    name="episode",
    help="Play an episode of a running server from a shell, one process per step.",
    help_epilogue=EPILOGUE,
)


@episode.command(sort_key=0)
def start(
    task: Annotated[str | None, Parameter(name="TASK")] = None,
    /,
    *,
    split: Annotated[str | None, Parameter(metavar="NAME")] = None,
    seed: int | None = None,
    launch_time: Annotated[datetime | None, Parameter(metavar="TIME")] = None,
    max_calls: int | None = None,
    policy: Literal["visible", "meta", "controller"] | None = None,
    label: Labels = (),
    wait: bool = True,
    url: Url = None,
) -> int:
    """Start a task in a fresh sandbox; print its handle, address, prompt and tools.

    Parameters
    ----------
    task
        The task's id. [drawn at random]
    split
        Draw from this split only.
    seed
        Makes the draw repeatable.
    launch_time
        The current time as the task sees it, ISO 8601. [now]
    max_calls
        Maximum number of tool calls.
    policy
        Who sees the reward. [the server's]
    wait
        Wait until the episode is ready.
    """
    # If the wait is interrupted, nobody ever learns the handle; the server then ends the episode itself.
    params = {
        "task": task,
        "split": split,
        "seed": seed,
        "launch_time": launch_time.isoformat() if launch_time else None,
        "max_calls": max_calls,
        "policy": policy,
        "labels": parse_labels(label) or None,
        "wait": wait,
    }
    return _run(_start, url, params)


@episode.command(sort_key=1)
def tools(handle: Handle, /, *, url: Url = None) -> int:
    """List an episode's tools with their schemas; waits until the episode is ready."""
    return _run(_step, url, handle, "list_tools")


@episode.command(sort_key=2)
def call(
    handle: Handle,
    tool: Annotated[str, Parameter(name="TOOL")],
    arguments: Annotated[str, Parameter(name="ARGUMENTS", allow_leading_hyphen=True)] = "{}",
    /,
    *,
    url: Url = None,
) -> int:
    """Call one of an episode's tools and print the tool's reply unchanged.

    Parameters
    ----------
    tool
        The tool's name.
    arguments
        A JSON object; `@FILE` reads it from a file, `-` from stdin.
    """
    return _run(_call_tool, url, handle, tool, arguments)


@episode.command(sort_key=3)
def claim(
    handle: Handle,
    answer: Annotated[str | None, Parameter(name="ANSWER", allow_leading_hyphen=True)] = None,
    /,
    *,
    truncated: Flag = False,
    turns: int | None = None,
    url: Url = None,
) -> int:
    """Claim that an episode's task is done, which ends the attempt.

    Parameters
    ----------
    answer
        The final answer; `-` reads it from stdin.
    truncated
        End the attempt without a claim; the verdict is marked as truncated.
    turns
        Number of turns the agent took, for rubrics that use it.
    """
    text = sys.stdin.read() if answer == "-" else answer
    params = {"answer": text, "truncated": truncated or None, "turns": turns}
    return _run(_step, url, handle, "claim_done", params)


@episode.command(sort_key=4)
def evaluate(handle: Handle, /, *, url: Url = None) -> int:
    """Grade an episode and print its verdict; later calls print the same verdict."""
    return _run(_step, url, handle, "evaluate", {}, _verdict)


@episode.command(sort_key=5)
def close(handle: Handle, /, *, url: Url = None) -> int:
    """Close an episode and remove its sandbox; a claimed attempt is still graded."""
    return _run(_step, url, handle, "close_episode")


@episode.command(sort_key=6)
def status(handle: Handle, /, *, url: Url = None) -> int:
    """Print an episode's phase, number of calls and end reason."""
    return _run(_step, url, handle, "episode_status")


@episode.command(name="list", sort_key=7)
def list_(*, url: Url = None) -> int:
    """List your episodes on the server, newest first: your token's, or without one all started here."""
    return _run(_list, url)


class _StepError(Exception):
    """A step failed; `status` is the process's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def _run(step: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    try:
        return anyio.run(step, *arguments)
    except _StepError as error:
        report(error.message)
        return error.status


async def _start(url: str | None, params: Mapping[str, Any]) -> int:
    info = (await _request(url, "start_episode", params)).structured or {}
    if not _has_token():
        _record_start(url, str(info.get("episode", "")))
    return _print(dict(info))


async def _list(url: str | None) -> int:
    from decathlon_client import UnknownEpisodeError

    episodes: list[Mapping[str, Any]] = []
    async with _connect(url) as server:
        if _has_token():
            return _print(dict((await server.call_lobby("list_episodes")).structured or {}))
        for record in _recorded_starts(url):
            try:
                reply = await server.call_lobby("episode_status", {"episode": record.name})
            except UnknownEpisodeError:
                record.unlink(missing_ok=True)
            else:
                episodes.append(reply.structured or {})
    return _print({"episodes": episodes})


def _record_start(url: str | None, handle: str) -> None:
    """Keep the handle of an episode for `list`, as an empty file named like it."""
    # Without tokens a server lists the episodes of one MCP session, and each step has its own.
    folder = _starts_folder(url)
    with suppress(OSError):  # such as a home folder that cannot be written: the episode runs nevertheless
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / quote(handle, safe="")).touch(mode=0o600)
        for record in _recorded_starts(url, from_newest=MAX_STARTS):
            record.unlink(missing_ok=True)


def _recorded_starts(url: str | None, *, from_newest: int = 0) -> list[Path]:
    """The files of `_record_start` for this server, newest first."""
    with suppress(OSError):
        return sorted(_starts_folder(url).iterdir(), key=_modified, reverse=True)[from_newest:]
    return []


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # removed by another step
        return 0.0


def _starts_folder(url: str | None) -> Path:
    from decathlon_client.client_values import server_url

    return default_state() / "shell" / quote(server_url(url).rstrip("/").removesuffix("/mcp"), safe="")


def _has_token() -> bool:
    from decathlon_client.client_values import server_token

    return bool(server_token(None))


async def _call_tool(url: str | None, handle: str, tool: str, arguments: str) -> int:
    params = {"name": tool, "arguments": _arguments(arguments)}
    return await _step(
        url, handle, "call_tool", params, lambda reply: (reply.raw, TOOL_FAILED if reply.is_error else 0)
    )


def _structured(reply: Reply) -> tuple[Mapping[str, Any], int]:
    return dict(reply.structured or {"text": reply.text}), 0


def _verdict(reply: Reply) -> tuple[Mapping[str, Any], int]:
    if (verdict := reply.verdict) is None:
        raise _StepError(reply.text)
    return verdict, NO_VERDICT if "reward" not in verdict else 0 if verdict.get("success") else NOT_PASSED


async def _step(
    url: str | None,
    handle: str,
    tool: str,
    params: Mapping[str, Any] = MappingProxyType({}),
    outcome: Callable[[Reply], tuple[Mapping[str, Any], int]] = _structured,
) -> int:
    """Call a tool of the lobby for an episode, and print what the outcome is: a value and the exit status."""
    url, handle = _resolve_handle(url, handle)
    return _print(*outcome(await _request(url, tool, {"episode": handle, **params})))


async def _request(url: str | None, tool: str, params: Mapping[str, Any]) -> Reply:
    """Call a tool of the lobby, leaving out params that are None."""
    arguments = {name: value for name, value in params.items() if value is not None}
    async with _connect(url) as server:
        return await server.call_lobby(tool, arguments, on_progress=_progress_printer())


@asynccontextmanager
async def _connect(url: str | None) -> AsyncGenerator[Decathlon]:
    # Imported late: the client takes over half a second, which every other command would pay for.
    from decathlon_client import AtCapacityError, ClientError, Decathlon

    from decathlon_mcp.cli.console import reporting_absence

    try:
        async with reporting_absence(url), Decathlon(url) as server:
            yield server
    except AtCapacityError as error:
        raise _StepError(error.message, AT_CAPACITY) from None
    except ClientError as error:
        raise _StepError(error.message) from None
    except ValueError as error:
        raise _StepError(str(error), USAGE_ERROR) from None


def _progress_printer() -> OnProgress | None:
    """Print progress on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        return None

    async def print_progress(progress: float, total: float | None, message: str | None) -> None:
        share = f"{progress:g} of {total:g}" if total else f"{progress:g}"
        report(f"{message or 'in progress'} ({share})")

    return print_progress


def _resolve_handle(url: str | None, handle: str) -> tuple[str | None, str]:
    """Return the server's URL and the episode's handle; a full address holds both.

    Raises _StepError for a text without the form of either, such as a tool's name with EPISODE forgotten.
    """
    name = handle
    if "://" in handle:
        root, _, path = handle.partition("/episodes/")
        url, name = root, path.partition("/")[0] if urlsplit(root).netloc else ""
    if not HANDLE.fullmatch(name):
        known = "name the `episode` that `start` printed, or its address"
        raise _StepError(f"{handle!r} is not an episode: {known}", USAGE_ERROR)
    return url, name


def _arguments(value: str) -> dict[str, Any]:
    """The object in this JSON text, in the content of `@FILE`, or in stdin for `-`."""
    try:
        text = sys.stdin.read() if value == "-" else value
        if value.startswith("@"):
            text = Path(value[1:]).read_text("utf-8")
        arguments = as_object(json.loads(text))
    except OSError as error:
        raise _StepError(f"{value[1:]}: {error.strerror}", USAGE_ERROR) from None
    except ValueError as error:
        raise _StepError(f"the arguments are not JSON: {error}", USAGE_ERROR) from None
    if arguments is None:
        raise _StepError("the arguments must be a JSON object, such as '{}'", USAGE_ERROR)
    return arguments


def _print(value: Mapping[str, Any], status: int = 0) -> int:
    print_json(value, indent=None)
    return status
