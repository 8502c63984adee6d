"""`episode`: an episode from a shell, one process a step. What each step takes; `steps` takes them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, Literal

import anyio
from cyclopts import App, Group, Parameter

DEFAULT_URL = "http://127.0.0.1:8765"
SERVER = Group("Server", sort_key=1)
EPILOGUE = (
    "Prints one JSON value on stdout. A token is taken from DECATHLON_TOKEN. Exit status: 0 done "
    "(`evaluate`: passed), 1 it went wrong, 2 not understood, 3 the tool failed, 4 the attempt did not pass, "
    "5 no verdict, 75 the server is full: try again."
)

Url = Annotated[
    str,
    Parameter(
        group=SERVER, metavar="URL", help="The server; where an episode's address is given, that one's."
    ),
]
Handle = Annotated[
    str, Parameter(metavar="EPISODE", help="What `start` called `episode`, or the episode's address.")
]

episode = App(
    name="episode",
    help="Play an episode of a running server from a shell, one process a step.",
    help_epilogue=EPILOGUE,
    sort_key=3,
)


@episode.command(sort_key=0)
def start(
    task: Annotated[str | None, Parameter(metavar="TASK")] = None,
    /,
    *,
    split: Annotated[str | None, Parameter(metavar="NAME")] = None,
    seed: int | None = None,
    launch_time: Annotated[datetime | None, Parameter(metavar="TIME")] = None,
    max_calls: int | None = None,
    policy: Literal["visible", "meta", "controller"] | None = None,
    wait: bool = True,
    url: Url = DEFAULT_URL,
) -> int:
    """Start a task in a fresh sandbox: its handle, address, prompt and tools.

    Parameters
    ----------
    task
        The task's id; without it, one is drawn at random.
    split
        Draw from this split only.
    seed
        Makes the draw repeatable.
    launch_time
        What time it is for the task, ISO 8601. [now]
    max_calls
        Tool calls the episode may make.
    policy
        Who sees the reward. [the server's]
    wait
        Wait until the episode is ready.
    """
    from decathlon_mcp.cli import steps

    asked = {
        "task": task,
        "split": split,
        "seed": seed,
        "launch_time": launch_time.isoformat() if launch_time else None,
        "max_calls": max_calls,
        "policy": policy,
        "wait": wait,
    }
    return _run(steps.start, url, asked)


@episode.command(sort_key=1)
def tools(handle: Handle, /, *, url: Url = DEFAULT_URL) -> int:
    """List an episode's tools with their schemas, once it is ready."""
    from decathlon_mcp.cli import steps

    return _run(steps.ask, url, handle, "list_tools")


@episode.command(sort_key=2)
def call(
    handle: Handle,
    tool: Annotated[str, Parameter(metavar="TOOL")],
    arguments: Annotated[str, Parameter(metavar="ARGUMENTS", allow_leading_hyphen=True)] = "{}",
    /,
    *,
    url: Url = DEFAULT_URL,
) -> int:
    """Call one of an episode's tools; the reply is the tool's own, as it came.

    Parameters
    ----------
    tool
        The tool's name.
    arguments
        A JSON object; `@FILE` reads it from a file, `-` from stdin.
    """
    from decathlon_mcp.cli import steps

    return _run(steps.call, url, handle, tool, arguments)


@episode.command(sort_key=3)
def claim(
    handle: Handle,
    answer: Annotated[str | None, Parameter(metavar="ANSWER", allow_leading_hyphen=True)] = None,
    /,
    *,
    truncated: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    turns: int | None = None,
    url: Url = DEFAULT_URL,
) -> int:
    """Claim that an episode's task is done, which ends the attempt.

    Parameters
    ----------
    answer
        The last words on the task; `-` reads them from stdin.
    truncated
        Nothing is claimed: the attempt is cut short, and the verdict says so.
    turns
        Turns the agent took, for a rubric that weighs them.
    """
    from decathlon_mcp.cli import steps

    return _run(steps.claim, url, handle, answer, truncated, turns)


@episode.command(sort_key=4)
def evaluate(handle: Handle, /, *, url: Url = DEFAULT_URL) -> int:
    """Grade an episode and print its verdict; later calls print the same."""
    from decathlon_mcp.cli import steps

    return _run(steps.evaluate, url, handle)


@episode.command(sort_key=5)
def close(handle: Handle, /, *, url: Url = DEFAULT_URL) -> int:
    """Close an episode and remove its sandbox; what was claimed is graded all the same."""
    from decathlon_mcp.cli import steps

    return _run(steps.ask, url, handle, "close_episode")


@episode.command(sort_key=6)
def status(handle: Handle, /, *, url: Url = DEFAULT_URL) -> int:
    """Tell where an episode stands: its phase, its calls, why it ended."""
    from decathlon_mcp.cli import steps

    return _run(steps.ask, url, handle, "episode_status")


class StepError(Exception):
    """A step that was not done; `status` is what the process ends with."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def _run(step: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    try:
        return anyio.run(step, *arguments)
    except StepError as error:
        sys.stderr.write(f"decathlon-mcp: {' '.join(error.message.split())}\n")
        return error.status
