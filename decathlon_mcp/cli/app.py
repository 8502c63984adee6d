"""The commands: what each takes, and where it is done. Errors end here, as one line and a status."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import anyio
from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError
from pydantic import ValidationError

from decathlon_mcp import __version__
from decathlon_mcp.cli.episode import episode
from decathlon_mcp.cli.install.command import install
from decathlon_mcp.cli.options import (
    ANY_TASK,
    DOCTOR_DEFAULTS,
    PLAY_DEFAULTS,
    SERVER_DEFAULTS,
    SOURCES,
    TASKS_DEFAULTS,
    DoctorSettings,
    PlaySettings,
    ServerSettings,
    TasksSettings,
    Wanted,
)
from decathlon_mcp.errors import BadRequestError, DecathlonError

EPILOGUE = (
    "Every setting is also a variable (DECATHLON_MAX_SANDBOXES=8) and a line of decathlon.toml "
    "(max_sandboxes = 8); flags come first, then variables, then the file."
)
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
ADDRESS = Group("Address", sort_key=1)
THIS = Group("This command", sort_key=2)

app = App(
    name="decathlon-mcp",
    help="Toolathlon as an environment for MCP clients: connect, play a task, get its reward.",
    help_format="markdown",
    help_epilogue="`decathlon-mcp demo` shows a whole episode; `decathlon-mcp COMMAND --help` says more.",
    version=__version__,
    config=SOURCES,
    group_parameters=THIS,
)
app.command(episode)
app.command(install, sort_key=3)


def _fits_as_name(kind: object, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError("A token's name is of letters, digits and _.@-, at most 64 of them.")


def _at_least_one(kind: object, number: int | None) -> None:
    if number is not None and number < 1:
        raise ValueError("At least one.")


@app.command(sort_key=0, help_epilogue=EPILOGUE)
def serve(
    *,
    host: Annotated[str, Parameter(group=ADDRESS)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=ADDRESS)] = 8765,
    public_url: Annotated[str | None, Parameter(group=ADDRESS, metavar="URL")] = None,
    allowed_host: Annotated[
        tuple[str, ...], Parameter(group=ADDRESS, metavar="NAME", negative=(), show_default=False)
    ] = (),
    ready_file: Annotated[Path | None, Parameter(group=ADDRESS, metavar="FILE")] = None,
    settings: ServerSettings = SERVER_DEFAULTS,
) -> int:
    """Serve tasks to MCP clients over streamable HTTP.

    Parameters
    ----------
    host
        Address to listen on; beyond loopback only with `--tokens`.
    port
        Port to listen on; 0 takes a free one.
    public_url
        How clients reach this server, where that is not its own address.
    allowed_host
        A name that clients may call this server by. May be given more than once.
    ready_file
        Gets the server's URL, once it can be used.
    """
    from decathlon_mcp.cli.serve import ListenAddress, serve

    doorway = ListenAddress(host, port, public_url, allowed_host, ready_file)
    return _run(serve, settings, doorway)


@app.command(sort_key=1, help_epilogue=EPILOGUE)
def stdio(
    *,
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    url: Annotated[str | None, Parameter(metavar="URL")] = None,
    settings: ServerSettings = SERVER_DEFAULTS,
) -> int:
    """Serve one client over stdin and stdout: the lobby, or an episode of `--task`.

    Parameters
    ----------
    task
        The process is an episode of this task.
    url
        Be a bridge to this server, whose settings are its own; its token in `DECATHLON_TOKEN`.
    """
    if url:
        from decathlon_client.bridge import bridge

        return _run(bridge, url, task)
    from decathlon_mcp.cli.stdio import serve

    return _run(serve, settings, task)


@app.command(sort_key=2, help_epilogue=EPILOGUE)
def tasks(
    *,
    sample: Annotated[int | None, Parameter(metavar="N", validator=_at_least_one)] = None,
    check: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    conflicts: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    wanted: Wanted = ANY_TASK,
    settings: TasksSettings = TASKS_DEFAULTS,
) -> int:
    """List the tasks there are, what each needs, and whether it can run here.

    Parameters
    ----------
    sample
        Instead of all, draw so many of those that can run here.
    check
        Look into a sandbox as well, and say of each task what is missing. 0 only where nothing is.
    conflicts
        Instead, list the accounts and the conflict groups that tasks share, and the tasks.
    json
        Print `{"tasks": [...]}`.
    """
    if conflicts:
        from decathlon_mcp.cli.conflicts import show as show_conflicts

        return show_conflicts(settings, wanted, as_json=json)
    if sample is None and wanted.seed is not None:
        raise BadRequestError("--seed is for a --sample")
    if check and sample is not None:
        raise BadRequestError(
            "--sample draws of what can run, and --check is for what cannot: give one of them"
        )
    if check:
        from decathlon_mcp.cli.check import check as check_tasks

        return _run(check_tasks, settings, wanted, json)
    from decathlon_mcp.cli.tasks import show

    return show(settings, wanted, sample=sample, as_json=json)


@app.command(sort_key=3, help_epilogue=EPILOGUE)
def doctor(
    *,
    host: Annotated[str, Parameter(group=ADDRESS)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=ADDRESS)] = 8765,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    settings: DoctorSettings = DOCTOR_DEFAULTS,
) -> int:
    """Look whether this machine is ready, and say what to do about what is not.

    Parameters
    ----------
    host
        Address that `serve` would listen on.
    port
        Port that `serve` would listen on.
    json
        Print `{"ready": ..., "findings": [...]}`.
    """
    from decathlon_mcp.cli.doctor import examine

    return _run(examine, settings, host, port, json)


@app.command(sort_key=4)
def token(
    name: Annotated[str, Parameter(validator=_fits_as_name)],
    /,
    *,
    role: Literal["player", "controller", "admin"] = "player",
) -> int:
    """Make a token: its secret goes to stderr, the line for the `--tokens` file to stdout.

    Parameters
    ----------
    name
        Whose it is.
    role
        `admin` may use every episode, the others their own.
    """
    from decathlon_mcp.cli.token import make

    return make(name, role)


@app.command(sort_key=5)
def verify(
    files: Annotated[tuple[Path, ...], Parameter(metavar="FILE", negative=())],
    /,
    *,
    key: Annotated[tuple[str, ...], Parameter(metavar="KEY", negative=(), show_default=False)] = (),
    state: Annotated[Path | None, Parameter(metavar="DIR")] = None,
) -> int:
    """Check that verdicts are what a server signed; 0 only when all of them are.

    Parameters
    ----------
    files
        A `verdict.json`, a kept reply of `evaluate`, or many of them, one a line.
    key
        The server's public key (hexadecimal, base64), a file with it, or the server's address. May be given
        more than once. [that of the state folder]
    state
        The server's state folder, whose key it is. [the default one]
    """
    from decathlon_mcp.cli.verify import verify as check

    return check(files, key, state)


@app.command(sort_key=6)
def key(*, state: Annotated[Path | None, Parameter(metavar="DIR")] = None) -> int:
    """Print the public key of the server's signatures, made where there is none yet.

    Parameters
    ----------
    state
        The server's state folder. [the default one]
    """
    from decathlon_mcp.cli.verify import show_key

    return show_key(state)


@app.command(sort_key=7)
def demo(
    *,
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    all: Annotated[bool, Parameter(negative=(), show_default=False)] = False,  # noqa: A002
) -> int:
    """Start a server, play a bundled task through it by a script, show each step.

    Parameters
    ----------
    task
        The task to play.
    all
        Play all of them.
    """
    from decathlon_mcp.cli.demo import play

    return _run(play, task, all)


@app.command(sort_key=8, help_epilogue=EPILOGUE)
def play(
    task: Annotated[str | None, Parameter(metavar="TASK")] = None,
    /,
    *,
    url: Annotated[str | None, Parameter(group=ADDRESS, metavar="URL")] = None,
    script: Annotated[str | None, Parameter(metavar="FILE", env_var=(), allow_leading_hyphen=True)] = None,
    settings: PlaySettings = PLAY_DEFAULTS,
) -> int:
    """Play a task by hand in this terminal; with `--script`, its calls from a file.

    Parameters
    ----------
    task
        The task to play. [picked from a list]
    url
        A server that runs already; its token in `DECATHLON_TOKEN`. [one in this process]
    script
        JSON calls, one a line, `-` for stdin; prints the verdict. Status 0 only with a pass.
    """
    from decathlon_mcp.cli.play import play as play_task

    return _run(play_task, settings, task, url, script)


@app.command(sort_key=9)
def version() -> int:
    """Print the version."""
    sys.stdout.write(f"{__version__}\n")
    return 0


def run(words: Sequence[str]) -> int:
    """Do what the words of a command line say; the status to exit with."""
    try:
        status: object = app(
            words or ["--help"], exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except DecathlonError as error:
        return _complain(error.message, 1)
    except CycloptsError as error:
        return _complain(_usage_fault(error), 2)
    except BaseExceptionGroup as group:
        if (error := _only(group)) is None:
            raise
        return _complain(error.message, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough of it; the interpreter must not flush what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0


def _run(work: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    """Run what a command does in an event loop, the quick one where there is one."""
    try:
        import uvloop as _  # noqa: F401
    except ModuleNotFoundError:
        return anyio.run(work, *arguments)
    return anyio.run(work, *arguments, backend_options={"use_uvloop": True})


def _complain(message: str, status: int) -> int:
    sys.stderr.write(f"decathlon-mcp: {' '.join(message.split())}\n")
    return status


def _only(error: BaseException) -> DecathlonError | None:
    """The one error of ours that task groups have wrapped, if that is all there is."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return _only(inner[0]) if len(inner) == 1 else None
    return error if isinstance(error, DecathlonError) else None


def _usage_fault(error: CycloptsError) -> str:
    """What is wrong with a command line, on one line; of a setting, where it came from."""
    cause = error.__cause__
    if isinstance(error, UnusedCliTokensError):
        return f"not understood: {' '.join(error.unused_tokens or ())}"
    if not isinstance(cause, ValidationError) or error.argument is None:
        return str(error)
    faults: list[str] = []
    for fault in cause.errors(include_url=False):
        name = str(fault["loc"][0]) if fault["loc"] else ""
        flag = f"--{name.replace('_', '-')}"
        tokens = [token for each in error.argument.children if flag in each.names for token in each.tokens]
        given = tokens[0].keyword if tokens and tokens[0].keyword else flag
        if tokens and tokens[0].source not in ("cli", "env"):
            given = f"{tokens[0].source}: {name}"
        said = fault["msg"].removeprefix("Input ").removeprefix("Value error, ")
        faults.append(f"{given} {said}, not {fault['input']!r}")
    return "; ".join(faults)
