"""The command `run` with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

from cyclopts import Parameter

from decathlon_mcp.cli.options import (
    DELIMITER,
    MORE,
    NO_FILTERS,
    PLAYER_SECONDS,
    Filters,
    Flag,
    Labels,
    run_async,
)
from decathlon_mcp.cli.usage import (
    check_not_empty,
    check_positive,
    check_run,
    check_seconds,
    check_url,
    failure_message,
    report,
)
from decathlon_mcp.errors import BadRequestError, DecathlonError, UnknownTaskError
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.plugins.agents.agent_programs import PRESETS
from decathlon_mcp.plugins.agents.run_agents import ModelAgent, ProgramAgent, RunOptions, run_agents
from decathlon_mcp.plugins.agents.serving import AGENT_DEFAULTS, AgentSettings

USAGE_ERROR = 2
DEFAULT_TURNS = 100
"""Answers that a model without a program may give in one attempt."""

_REPEATED = Parameter(group=MORE, negative=(), show_default=False)


def run(
    words: Annotated[tuple[str, ...], Parameter(name="TASK", negative=())] = (),
    /,
    *,
    agent: Literal["claude", "codex", "opencode", "gemini"] | None = None,
    model: Annotated[str | None, Parameter(metavar="NAME", validator=check_not_empty)] = None,
    base_url: Annotated[str | None, Parameter(metavar="URL", validator=check_url)] = None,
    max_turns: Annotated[int, Parameter(group=MORE, metavar="N", validator=check_positive)] = DEFAULT_TURNS,
    attempts: Annotated[int, Parameter(metavar="N", validator=check_positive)] = 1,
    jobs: Annotated[int, Parameter(metavar="N", validator=check_positive)] = 4,
    run: Annotated[str | None, Parameter(metavar="NAME", validator=check_run)] = None,
    url: Annotated[str | None, Parameter(metavar="URL", env_var=(), validator=check_url)] = None,
    player_seconds: Annotated[
        float, Parameter(group=MORE, metavar="SECONDS", validator=check_seconds)
    ] = PLAYER_SECONDS,
    model_url: Annotated[tuple[str, ...], _REPEATED, Parameter(metavar="URL")] = (),
    show: Annotated[tuple[Path, ...], _REPEATED, Parameter(metavar="FOLDER")] = (),
    env: Annotated[tuple[str, ...], _REPEATED, Parameter(metavar="NAME[=VALUE]", env_var=())] = (),
    list_withheld: Annotated[Flag, Parameter(group=MORE, env_var=())] = False,
    trust_command: Annotated[Flag, Parameter(group=MORE)] = False,
    again_without_calls: Annotated[Flag, Parameter(group=MORE)] = False,
    launch_time: Annotated[str | None, Parameter(group=MORE, metavar="TIME")] = None,
    label: Annotated[Labels, Parameter(group=MORE)] = (),
    json: Flag = False,
    filters: Filters = NO_FILTERS,
    settings: AgentSettings = AGENT_DEFAULTS,
) -> int:
    """Let an agent play tasks, and show how often it succeeds.

    The agent is a known program (`--agent claude`), a command of yours after `--`, or a model behind an
    OpenAI-compatible endpoint (`--model`). A program runs in namespaces, and reaches only its episode and its
    model. The same command again plays only the attempts that have no verdict. Exit status 0 if every attempt
    has a verdict, 1 if one has none, 2 for an invalid command line.

    Parameters
    ----------
    words
        Tasks to play. After `--` follows the agent's command, in whose arguments `{prompt}`, `{mcp_config}`,
        `{address}` and `{prompt_file}` are replaced. [all tasks that fit the filters and can run here]
    agent
        A known program, which must be on the PATH.
    model
        Model of `--agent`. Without `--agent`, this model plays; its key is in `OPENAI_API_KEY`.
    base_url
        Endpoint of a model without `--agent`. [`OPENAI_BASE_URL`, else OpenAI's]
    max_turns
        Answers of a model without `--agent`, after which an attempt is truncated.
    attempts
        Attempts at each task.
    jobs
        Attempts at the same time.
    run
        The run's name in `runs` and on the page. [the agent's name, with a digest of its command]
    url
        Let a model play on the server at this URL, which uses the same state folder; its token is read from
        `DECATHLON_TOKEN`. [a server in this process]
    player_seconds
        Time limit of an attempt, after which a program is killed and the attempt truncated.
    model_url
        Address of the model, which a program may reach; `none` without a model. Can be repeated. [the
        addresses in variables that end in `_BASE_URL`, else the model's address of `claude`, `codex` or
        `gemini`]
    show
        A further folder that a program may read, without a suite in it. Can be repeated.
    env
        A further variable for a program. Known programs get the variables of their models without it. Can be
        repeated.
    list_withheld
        Name the variables that a program does not get.
    trust_command
        Run the program as an ordinary process; the episodes' labels say so.
    again_without_calls
        Discard the verdicts on attempts without a call, as after a wrong key, and play these again. The label
        `again` of the new episodes says so.
    launch_time
        The time at which the attempts are played, in ISO 8601, which the prompt may name. [now]
    json
        Print one JSON object for each attempt instead of a table.
    """
    tasks, command = _split(words)
    labels = parse_labels(label)
    for_programs = (model_url, show, env, list_withheld, trust_command)
    for_models = (base_url, max_turns != DEFAULT_TURNS)
    problem = None
    if bool(agent) + bool(command) > 1 or not (agent or command or model):
        problem = "name who plays: --agent NAME, --model NAME, or a command after `--`"
    elif command and model:
        problem = "--model is for --agent, or alone; name the model in the command after `--`"
    elif (agent or command) and url is not None:
        problem = "--url is for --model: a program plays on a server in this process, which keeps it apart"
    elif (agent or command) and any(for_models):
        problem = "--base-url and --max-turns are for --model alone; a program has its own"
    elif not (agent or command) and any(for_programs):
        problem = "--model-url, --show, --env, --list-withheld and --trust-command are for programs"
    elif "run" in labels:
        problem = "--run names the run, not --label"
    elif filters.seed is not None or (tasks and filters.model_dump(exclude_defaults=True)):
        problem = "name tasks, or filters to play all that fit; --seed is for `tasks --sample`"
    if problem is not None:
        report(problem)
        return USAGE_ERROR

    if agent or command:
        player = ProgramAgent(
            command=PRESETS[agent].command_for(model) if agent else command,
            urls=model_url,
            shown=show,
            variables=env,
            lists_withheld=list_withheld,
            trusted=trust_command,
        )
    else:
        player = ModelAgent(model=str(model), base_url=base_url, turns=max_turns)
    options = RunOptions(
        tasks=tasks or filters,
        attempts=attempts,
        jobs=jobs,
        seconds=player_seconds,
        run=run,
        url=url,
        again_without_calls=again_without_calls,
        as_json=json,
        launch_time=launch_time,
        labels=labels,
    )
    try:
        return run_async(run_agents, settings, player, options)
    except (DecathlonError, BaseExceptionGroup) as error:
        message = failure_message(error)
        if message is None or not _is_mistake(error):
            raise
        report(message)
        return USAGE_ERROR


def _is_mistake(error: BaseException) -> bool:
    """Whether the command line asks for what there is not, also in a task group's error."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_mistake, cast("BaseExceptionGroup[BaseException]", error).exceptions))
    return isinstance(error, (BadRequestError, UnknownTaskError))


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words before and after the first `--`."""
    if DELIMITER not in words:
        return words, ()
    place = words.index(DELIMITER)
    return words[:place], words[place + 1 :]
