"""`serve-episode` and `episode verdict`, as the command line has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from decathlon_mcp.cli.options import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    EPILOGUE,
    NO_FILTERS,
    PLAYER_SECONDS,
    SANDBOX_SETTINGS,
    Filters,
    Flag,
    Host,
    HostNames,
    Labels,
    Port,
    StateFolder,
    settings_model,
)
from decathlon_mcp.cli.running import run_async
from decathlon_mcp.cli.usage import check_positive, check_seconds
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.plugins.shell.shell import episode
from decathlon_mcp.settings import default_state

AgentOptions = settings_model("AgentOptions", (*SANDBOX_SETTINGS, "network", "language", "max_calls"))
AgentSettings = Annotated[AgentOptions, Parameter(name="*")]
AGENT_DEFAULTS = AgentOptions.model_validate({})


def add_commands(app: App) -> None:
    app.command(serve_episode, sort_key=8, help_epilogue=EPILOGUE)
    episode.command(verdict)


def serve_episode(
    words: Annotated[tuple[str, ...], Parameter(metavar="[TASK] [-- COMMAND]", negative=())] = (),
    /,
    *,
    run: Flag = False,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    allowed_host: Annotated[HostNames, Parameter(metavar="NAME")] = (),
    tasks: Annotated[tuple[str, ...], Parameter(metavar="ID", negative=(), show_default=False)] = (),
    attempts: Annotated[int, Parameter(metavar="N", validator=check_positive)] = 1,
    concurrency: Annotated[int, Parameter(metavar="N", validator=check_positive)] = 1,
    player_seconds: Annotated[float, Parameter(metavar="SECONDS", validator=check_seconds)] = PLAYER_SECONDS,
    model_url: Annotated[tuple[str, ...], Parameter(metavar="URL", negative=(), show_default=False)] = (),
    show: Annotated[tuple[Path, ...], Parameter(metavar="FOLDER", negative=(), show_default=False)] = (),
    env: Annotated[
        tuple[str, ...], Parameter(metavar="NAME[=VALUE]", negative=(), env_var=(), show_default=False)
    ] = (),
    trust_command: Flag = False,
    resume: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    again_without_calls: Flag = False,
    launch_time: Annotated[str | None, Parameter(metavar="TIME")] = None,
    label: Labels = (),
    json: Flag = False,
    filters: Filters = NO_FILTERS,
    settings: AgentSettings = AGENT_DEFAULTS,
) -> int:
    """Let an agent's program play a task and grade it, or serve an episode to an agent.

    The program runs in namespaces, without the state folder and the tasks' files, and reaches its episode
    and its model. Exit status 0 if every attempt passed, 4 if one did not, 5 if one has no verdict or if all
    ended before a call.

    Without `--run`, an episode is served at `http://HOST:PORT/mcp` until a signal. It can only be played
    there; `episode verdict` grades it.

    Parameters
    ----------
    words
        The task, and after `--` the command. `{prompt}`, `{mcp_config}`, `{address}` and `{prompt_file}` in
        its arguments are replaced.
    run
        Run the command.
    host
        Without `--run`: address to listen on. Who reaches it can play, without a token.
    port
        Without `--run`: port to listen on; 0 picks a free one.
    allowed_host
        Without `--run`: a host name that the agent may use for this address. Can be repeated.
    tasks
        Play these tasks, or with filters all that fit and can run here. Can be repeated, or `a,b`.
    attempts
        Attempts at each task.
    concurrency
        Attempts at the same time.
    player_seconds
        Time limit of an attempt, after which the command is killed and the attempt truncated.
    model_url
        Address of the model, which the command may reach. Can be repeated. [those in variables that end in
        `_BASE_URL`, else that of `claude`, `codex` or `gemini`]
    show
        A folder that the command may read besides its program's; none with a suite in it. Can be repeated.
    env
        A variable that the command gets besides those of known programs' models. Can be repeated.
    trust_command
        Run the command as an ordinary process; the episodes' labels say so.
    resume
        File to which each verdict is appended. What has a verdict there is not played again.
    again_without_calls
        Discard the verdicts in that file on attempts without a call, and play these again. The label `again`
        of the run's new episodes says so.
    launch_time
        The time at which the attempts are played, in ISO 8601, which the prompt may name. [now]
    json
        With several attempts, print one JSON object for each.
    """
    chosen = tuple(task for text in tasks for task in text.split(",") if task)
    has_filters = bool(filters.model_dump(exclude_defaults=True))
    several = bool(chosen) or has_filters
    names, command = (chosen, words) if several else (words[:1], words[1:])
    of_runs = (
        *(several, attempts > 1, concurrency > 1, model_url, show, env, trust_command, resume, json),
        again_without_calls,
    )
    if run != bool(command) or not (run or names) or (not run and any(of_runs)):
        raise BadRequestError(
            "give the command: decathlon-mcp serve-episode TASK --run -- COMMAND; for an agent that is "
            "started otherwise, give the task alone, without options for a command"
        )
    if again_without_calls and resume is None:
        raise BadRequestError("--again-without-calls is about the verdicts in the file of --resume")
    if filters.seed is not None or (chosen and has_filters):
        raise BadRequestError(
            "--tasks names tasks, filters choose all that fit; --seed is for `tasks --sample`"
        )
    from decathlon_mcp.cli.serve import ListenAddress
    from decathlon_mcp.plugins.agents.serve_episode import ProgramOptions, serve_address, serve_episode

    options = ProgramOptions(
        seconds=player_seconds,
        urls=model_url,
        shown=show,
        variables=env,
        trusted=trust_command,
        attempts=attempts,
        concurrency=concurrency,
        resume=resume,
        again_without_calls=again_without_calls,
        as_json=json,
        launch_time=launch_time,
        labels=parse_labels(label),
    )
    if not run:
        address = ListenAddress(host, port, None, allowed_host, (), None, page=False)
        return run_async(serve_address, settings, names[0], address, options)
    return run_async(serve_episode, settings, names or filters, command, options)


def verdict(*, state: StateFolder = None) -> int:
    """Grade the episode that `serve-episode TASK` serves, and print its verdict.

    Asked again, it prints the same. Exit status 0 if the attempt passed, 4 if it did not, 5 if it has no
    verdict.
    """
    from decathlon_mcp.plugins.agents.serve_episode import print_verdict

    return run_async(print_verdict, state or default_state())
