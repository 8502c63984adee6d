"""The list of commands with their options. Errors become one line on stderr and an exit status here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.completion.detect import ShellDetectionError

from decathlon_mcp import __version__
from decathlon_mcp.cli import supervisor
from decathlon_mcp.cli.options import (
    ADDRESS,
    DEFAULT_HOST,
    DEFAULT_PORT,
    DELIMITER,
    MORE,
    SERVER_DEFAULTS,
    SOURCES,
    Flag,
    Host,
    HostNames,
    Labels,
    Port,
    ServerSettings,
    describe_unknown_variables,
    names_server,
    run_async,
    shown_default,
    unknown_variables,
)
from decathlon_mcp.cli.usage import check_url, failure_message, report, usage_message
from decathlon_mcp.errors import BadRequestError, SchemaError, UnknownEpisodeError, UnknownTaskError
from decathlon_mcp.hooks import Command, broken, load, plugins
from decathlon_mcp.labels import parse_labels

GENERAL = Group("General", sort_key=2)
HELP, HELP_ALL = frozenset({"--help", "-h"}), "--help-all"
COMMANDS = {
    "Play": ("demo", "play", "run", "episode", "install"),
    "Serve": ("serve", "stdio", "serve-episode", "doctor", "tasks"),
    "Look": ("view", "runs", "show", "export"),
    "Own tasks": ("init", "audit"),
    "Operate": ("token", "key", "verify", "regrade", "replay", "gc", "recordings"),
    "This command": ("completion", "--help", "--version"),
}
"""The commands by what people do, in the order of the help."""
PLUGINS = Group("Plug-ins", sort_key=len(COMMANDS))
"""Other commands of plug-ins, which come last."""
app = App(
    name="decathlon-mcp",
    help="Toolathlon's tasks for MCP clients: connect, play a task, get the reward.",
    help_format="markdown",
    help_epilogue="Start with `decathlon-mcp demo`; `decathlon-mcp COMMAND --help` lists the options.",
    version=__version__,
    config=SOURCES,
    group_parameters=GENERAL,
    default_parameter=Parameter(show_default=shown_default),
)


# Each summary is also a text: PYTHONOPTIMIZE=2 leaves docstrings out.
@app.command(help="Serve tasks to MCP clients over HTTP.")
def serve(
    *,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    public_url: Annotated[str | None, Parameter(group=ADDRESS, metavar="URL", validator=check_url)] = None,
    allowed_host: Annotated[HostNames, Parameter(metavar="NAME")] = (),
    allowed_origin: Annotated[HostNames, Parameter(group=MORE, metavar="ORIGIN")] = (),
    ready_file: Annotated[Path | None, Parameter(group=MORE, metavar="FILE")] = None,
    no_page: Annotated[Flag, Parameter(group=MORE)] = False,
    no_supervisor: Annotated[Flag, Parameter(group=MORE, env_var=())] = False,
    settings: ServerSettings = SERVER_DEFAULTS,
) -> int:
    """Serve tasks to MCP clients over HTTP.

    Parameters
    ----------
    host
        Address to listen on; any but loopback requires `--tokens`.
    port
        Port to listen on; 0 picks a free one.
    public_url
        URL by which clients reach this server, if it differs from the listening address.
    allowed_host
        A host name that clients may use for this server. Can be repeated.
    allowed_origin
        Origin of a page in a browser that may use this server (`http://localhost:6274`). Can be repeated.
    ready_file
        File to which the server's URL is written once the server is ready.
    no_page
        Leave out the page on which people watch and read episodes.
    no_supervisor
        Serve in this process, without a parent that starts the server again when it dies.
    """
    # `supervisor.applies` reads the flag, before the command line is parsed.
    from decathlon_mcp.cli.serve import ListenAddress, serve

    address = ListenAddress(host, port, public_url, allowed_host, allowed_origin, ready_file, not no_page)
    return run_async(serve, settings, address)


@app.command(help="Serve one MCP client over stdin and stdout.")
def stdio(
    *,
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    url: Annotated[str | None, Parameter(metavar="URL")] = None,
    label: Labels = (),
    settings: ServerSettings = SERVER_DEFAULTS,
) -> int:
    """Serve one MCP client over stdin and stdout.

    The client gets the lobby, whose tools list tasks and play them, or with `--task` one episode.

    Parameters
    ----------
    task
        Serve one episode of this task.
    url
        Relay to the server at this URL instead; the other settings are ignored, the token is read from
        `DECATHLON_TOKEN`. [`DECATHLON_URL`, if no suite is named]
    """
    if names_server(url, settings):
        from decathlon_client.bridge import bridge

        return run_async(bridge, url, task, parse_labels(label))
    from decathlon_mcp.cli.serve import stdio

    return run_async(stdio, settings, task, parse_labels(label))


@app.command(help="Play a bundled task from a script on a new server, step by step.")
def demo(
    *,
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    all: Flag = False,  # noqa: A002
) -> int:
    """Play a bundled task from a script on a new server, step by step.

    Parameters
    ----------
    task
        The task to play. [tune-reactor]
    all
        Play all bundled tasks.
    """
    from decathlon_mcp.cli.demo import demo

    return run_async(demo, task, all)


@app.command(help="Print or install the script for completion in a shell.")
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(name="SHELL")] = None,
    /,
    *,
    install: Flag = False,
) -> int:
    """Print or install the script for completion in a shell.

    To try it in bash: `source <(decathlon-mcp completion bash)`.

    Parameters
    ----------
    shell
        The shell. [the shell that runs this command]
    install
        Save the script instead, and add a line that loads it to the startup file of bash or zsh.
    """
    try:
        if not install:
            sys.stdout.write(app.generate_completion(shell=shell))
            return 0
        file = app.install_completion(shell=shell)
    except ShellDetectionError:
        raise BadRequestError("the shell is not known; name it: decathlon-mcp completion bash") from None
    except OSError as error:
        raise BadRequestError(f"{error.filename}: {error.strerror}") from None
    sys.stdout.write(f"{file}\nOpen a new shell to use it.\n")
    return 0


@cache
def command_line() -> App:
    """The app with the commands of plug-ins, which are not imported yet. Raises SettingsError."""
    groups = {heading: Group(heading, sort_key=number) for number, heading in enumerate(COMMANDS)}
    places = {
        name: (groups[heading], position)
        for heading, names in COMMANDS.items()
        for position, name in enumerate(names)
    }
    commands = _plugin_commands()
    for name in sorted(commands, key=lambda name: " " in name):  # a further command after its `App`
        parent, _, last = name.rpartition(" ")
        _, command = commands[name]
        # Commands of a group have the heading of that group's own help.
        group, position = places.pop(name, (None if parent else PLUGINS, None))
        app_or_parent = app[parent] if parent else app
        app_or_parent.command(command.part, name=last, help=command.summary, group=group, sort_key=position)
    for name, (group, position) in places.items():
        if name in app:
            app[name].group, app[name].sort_key = group, position
    return app


@cache
def _plugin_commands() -> dict[str, tuple[str, Command]]:
    """Each command by its name, with the name of its plug-in. Raises SettingsError."""
    return {name: (plugin.name, command) for plugin in plugins() for name, command in plugin.commands.items()}


def import_command(name: str) -> None:
    """Import a command of a plug-in. Raises SettingsError if the plug-in is broken."""
    if name in _plugin_commands():
        plugin, command = _plugin_commands()[name]
        try:
            load(command.part)
        except Exception as error:  # whatever its module raises when it is imported
            raise broken(plugin, error) from error


def run(words: Sequence[str]) -> int:
    """Run the command line given by `words` and return the exit status.

    It is 2 for a wrong command line, also for a missing episode, run or task.
    """
    if words and words[0] == "help":
        words = [*words[1:], "--help"]
    is_whole = HELP_ALL in words
    words = ["--help" if word == HELP_ALL else word for word in words]
    try:
        app = command_line()
        if words:
            import_command(words[0])
        if HELP.intersection(words):
            from decathlon_mcp.cli.help import prepare_help

            prepare_help(app, [word for word in words if word not in HELP], whole=is_whole)
        _warn_of_unknown_variables(words)
        _, command = _plugin_commands().get(words[0] if words else "", ("", None))
        if command is not None and command.runs_program and DELIMITER in words:
            # Cyclopts drops the first one, and takes a second one for a word.
            place = words.index(DELIMITER)
            words = [*words[:place], DELIMITER, *words[place:]]
        status: object = app(
            words or ["--help"], exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError as error:
        report(usage_message(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except (Exception, BaseExceptionGroup) as error:
        errors = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])
        if errors.split(BrokenPipeError)[1] is None:
            # The reader closed the pipe. Without this, the interpreter would flush stdout at exit and fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if (message := failure_message(error)) is None:
            raise
        report(message)
        # A supervisor would start a server that cannot read its store again and again.
        is_usage = errors.split((UnknownEpisodeError, UnknownTaskError, SchemaError))[0] is not None
        return supervisor.USAGE_STATUS if is_usage else 1
    return status if isinstance(status, int) else 0


def _warn_of_unknown_variables(words: Sequence[str]) -> None:
    """Name the variables on stderr that are probably misspelt; `doctor` names all unknown variables."""
    if not words or words[0].startswith("-") or words[0] == "doctor":
        return
    # Others may belong to another program, and a log that is read by a program should have no such line.
    if not any(unknown_variables().values()):
        return
    # Only now, because it takes a while: a variable can also set an option of a single command.
    commands = list(_commands(command_line()))
    options = {
        option.removeprefix("--")
        for command in commands
        for argument in command.assemble_argument_collection(parse_docstring=False)
        for option in argument.names
    }
    if unknown := {name: near for name, near in unknown_variables(options).items() if near}:
        report(f"set, but not settings: {describe_unknown_variables(unknown)}")


def _commands(parent: App) -> Iterator[App]:
    """A command, or the commands of a group."""
    if parent.default_command:
        yield parent
        return
    for name in parent:
        if not name.startswith("-"):
            if parent is app:
                import_command(name)
            yield from _commands(parent[name])
