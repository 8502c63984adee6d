"""`serve-episode`: let an agent's program play a task, or a table of tasks, and grade what it has done.

Without a program, one episode is served at an address for an agent that others start; `episode verdict`
grades it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
from decathlon_client import ClientError, Decathlon, Episode
from decathlon_client.embedded import EmbeddedEndpoint
from decathlon_client.results import Result, Summary
from decathlon_client.resume import discard_verdicts
from decathlon_client.shutdown import shutdown_on_signal
from decathlon_client.values import Verdict
from starlette.types import ASGIApp

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import Filters, runnable_tasks
from decathlon_mcp.cli.output import print_json, printed, shell_path, this_command
from decathlon_mcp.cli.serve import ListenAddress
from decathlon_mcp.cli.usage import report
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import DecathlonError, ProviderUnavailableError
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import AllowedHosts
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.http.protocol import ConnectionLimits
from decathlon_mcp.plugins.agents.configuration import choose_variables
from decathlon_mcp.plugins.agents.launch import Launcher, NamespaceLauncher, TrustedLauncher
from decathlon_mcp.plugins.agents.player import RUNNING, STATUS_LABEL, AgentPlayer, ProgramFailedError
from decathlon_mcp.plugins.agents.playing import PATH, PlayingApp, playing
from decathlon_mcp.plugins.agents.programs import Program, find_program
from decathlon_mcp.plugins.agents.reach import read_endpoints
from decathlon_mcp.plugins.agents.verdict_socket import ask_for_verdict, giving_verdict
from decathlon_mcp.plugins.play.play import connect, redirect_logs
from decathlon_mcp.plugins.shell.shell import NO_VERDICT, NOT_PASSED
from decathlon_mcp.sandboxes.host.isolation import why_unavailable
from decathlon_mcp.sandboxes.host.plugin import answer_folders
from decathlon_mcp.sandboxes.kernel_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings, default_state

AGENT_LABEL, ISOLATION_LABEL, AGAIN_LABEL = "agent", "agent_isolation", "again"
"""Labels of each episode: the program's name, what kept it from the state folder, and which attempts of the
same run were discarded to be played again."""
WITHOUT_CALLS = "without_calls"
MAX_WITHHELD = 60
"""Names of variables in one message."""
WAIT_SECONDS = 60.0
"""How much longer than an attempt an episode lives without a request, so that a program that has stopped to
play is ended by its own time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """How programs are run. `seconds`: what an attempt may take. `urls`: of their model. `shown`: folders.

    `attempts` at each task, `concurrency` at once. `resume`: file with verdicts, see `Decathlon.batch`;
    `again_without_calls`: those on attempts without a call do not count. `variables`: see `choose_variables`.
    """

    seconds: float
    urls: tuple[str, ...] = ()
    shown: tuple[Path, ...] = ()
    variables: tuple[str, ...] = ()
    trusted: bool = False
    attempts: int = 1
    concurrency: int = 1
    resume: Path | None = None
    again_without_calls: bool = False
    as_json: bool = False
    launch_time: str | None = None
    labels: Mapping[str, str]


async def serve_episode(
    settings: Settings, chosen: Sequence[str] | Filters, command: Sequence[str], options: ProgramOptions
) -> int:
    """Play tasks with the command; returns the exit status. Raises DecathlonError.

    `chosen`: their ids, or filters for all that can run here.

    0 if every attempt has succeeded, `NOT_PASSED` if one has not, `NO_VERDICT` if one has no verdict, or if
    all ended before a call.
    """
    variables, withheld = choose_variables(_name_of(command), options.variables)
    program, launcher = await anyio.to_thread.run_sync(_prepare, settings, command, options, variables)
    raise_descriptor_limit()
    server = _with_longer_lives(settings, options.seconds)
    tasks = await anyio.to_thread.run_sync(_task_ids, server, chosen)
    _report_withheld(withheld)
    if options.again_without_calls and options.resume is not None:
        count = discard_verdicts(options.resume, _is_without_call)
        report(f"{count} attempts that made no call are played again; the label `{AGAIN_LABEL}` says so")
    is_single = len(tasks) == 1 and options.attempts == 1
    results = list[Result[int | None]]()
    async with shutdown_on_signal() as watcher:
        try:
            with redirect_logs(server):
                async with connect(server, None) as d, _served(d, server) as (registry, app, limits):
                    player = AgentPlayer(
                        registry=registry,
                        app=app,
                        limits=limits,
                        program=program,
                        launcher=launcher,
                        variables=variables,
                        seconds=options.seconds,
                        shows_output=is_single,
                    )
                    async with d.batch(
                        tasks,
                        concurrency=options.concurrency,
                        n=options.attempts,
                        progress=not is_single,
                        resume=options.resume,
                        launch_time=options.launch_time,
                        labels={
                            **options.labels,
                            AGENT_LABEL: program.name,
                            ISOLATION_LABEL: launcher.isolation,
                            STATUS_LABEL: RUNNING,
                            **({AGAIN_LABEL: WITHOUT_CALLS} if options.again_without_calls else {}),
                        },
                    ) as batch:
                        async for result in batch.run(player):
                            results.append(result)
                            _report(result, options, is_single=is_single)
        except ClientError as error:
            raise DecathlonError(error.message) from error
        if not (is_single or options.as_json):
            sys.stdout.write(f"{Summary.of(results)}\n")
        without_call = list(map(_ended_before_a_call, results))
        if any(without_call):
            _report_withheld(withheld)
        if results and all(without_call):
            what = "the attempt" if is_single else "every attempt"
            report(f"{what} ended before a call; the program's output ends with: {player.last_output}")
            return NO_VERDICT
        return max(map(_exit_status, results), default=0)
    return watcher.status or 1


def _name_of(command: Sequence[str]) -> str:
    return Path(command[0]).name


def _report_withheld(names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(map(printed, names[:MAX_WITHHELD]))
        more = f" and {len(names) - MAX_WITHHELD} more" if len(names) > MAX_WITHHELD else ""
        report(f"variables that the program does not get (--env NAME gives it one): {shown}{more}")


def _is_without_call(verdict: Verdict) -> bool:
    """Whether a verdict is on an attempt that ended before its program made a call or a claim."""
    return not verdict.metrics.get("calls") and not verdict.raw.get("claimed")


def _ended_before_a_call(result: Result[int | None]) -> bool:
    if result.verdict is None:
        return isinstance(result.failure, ProgramFailedError)
    return _is_without_call(result.verdict)


def _exit_status(result: Result[int | None]) -> int:
    """The exit status of the command for this attempt alone; the worst one is the largest."""
    if result.verdict is None:
        return NO_VERDICT
    return 0 if result.verdict.success else NOT_PASSED


async def serve_address(
    settings: Settings, task: str, address: ListenAddress, options: ProgramOptions
) -> int:
    """Serve one episode at an address that only plays, until a signal; returns the exit status.

    Prints the address and the prompt as JSON once it can be played. Of the options, `seconds`, `launch_time`
    and `labels` count. Raises DecathlonError.
    """
    raise_descriptor_limit()
    server = _with_longer_lives(settings, options.seconds)
    async with shutdown_on_signal() as watcher:
        try:
            with redirect_logs(server), listen(address.host, address.port) as listener:
                bound = replace(address, port=listener.getsockname()[1])
                async with (
                    connect(server, None) as d,
                    _served(d, server, hosts_for(address.host, address.allowed_host, None)) as (
                        _,
                        app,
                        limits,
                    ),
                    d.episode(task, launch_time=options.launch_time, labels=options.labels) as episode,
                    giving_verdict(episode, server.state),
                ):
                    assert episode.agent_address is not None
                    async with playing(PlayingApp(app, episode.agent_address), listener, limits):
                        url = f"{bound.url(bound.port)}{PATH}"
                        print_json({"task": task, "address": url, "prompt": episode.prompt}, indent=None)
                        sys.stdout.flush()
                        state = (
                            "" if server.state == default_state() else f" --state {shell_path(server.state)}"
                        )
                        report(f"{task} can be played at {url}; `{this_command()} verdict{state}` grades it")
                        await _truncate_late(episode, options.seconds)
        except ClientError as error:
            raise DecathlonError(error.message) from error
    return watcher.status or 1


async def _truncate_late(episode: Episode, seconds: float) -> None:
    """Close the attempt after that time; never returns."""
    await anyio.sleep(seconds)
    await episode.truncate()
    await anyio.sleep_forever()


async def print_verdict(state: Path) -> int:
    """Grade the episode that `serve_address` serves with this state folder; returns the exit status.

    It is that of `serve_episode`. Raises DecathlonError if there is no such episode.
    """
    verdict, problem = await ask_for_verdict(state)
    if verdict is not None:
        print_json(verdict)
    if problem:
        report(problem)
        return NO_VERDICT
    return 0 if (verdict or {}).get("success") is True else NOT_PASSED


def _with_longer_lives(settings: Settings, seconds: float) -> Settings:
    """Settings with which no episode ends before an attempt of that time, whatever its agent does."""
    names = ("idle_seconds", "first_use_seconds")
    return settings.model_copy(
        update={name: max(getattr(settings, name), seconds + WAIT_SECONDS) for name in names}
    )


def _prepare(
    settings: Settings, command: Sequence[str], options: ProgramOptions, variables: Mapping[str, str]
) -> tuple[Program, Launcher]:
    """The program and how it is started. Raises BadRequestError, ProviderUnavailableError."""
    if options.trusted:
        return find_program(command, isolated=False), TrustedLauncher()
    if reason := why_unavailable():
        raise ProviderUnavailableError(
            f"the program cannot be kept from the state folder and the tasks' answers here: {reason}. With "
            "--trust-command it runs as an ordinary process, and each verdict's labels say so"
        )
    hidden = [*answer_folders(settings), default_state()]
    program = find_program(command, shown=options.shown, hidden=hidden, isolated=True)
    return program, NamespaceLauncher(program, read_endpoints(options.urls, program.name, variables), hidden)


@asynccontextmanager
async def _served(
    d: Decathlon, settings: Settings, hosts: AllowedHosts | None = None
) -> AsyncGenerator[tuple[EpisodeRegistry, ASGIApp, ConnectionLimits]]:
    """The episodes of an embedded server, its ASGI application, and the limits of its connections."""
    endpoint = d._server  # pyright: ignore[reportPrivateUsage]
    assert isinstance(endpoint, EmbeddedEndpoint)
    max_body_bytes = settings.max_body_mib << 20
    app = http_app(endpoint.registry, hosts=hosts, max_body_bytes=max_body_bytes)
    limits = ConnectionLimits.for_bodies(max_body_bytes)
    async with app.router.lifespan_context(app):
        yield endpoint.registry, app, limits


def _task_ids(settings: Settings, chosen: Sequence[str] | Filters) -> list[str]:
    """The tasks that are played. Raises UnknownTaskError, BadRequestError if none fits, SuiteError."""
    catalogue = read_catalogue(settings)
    if isinstance(chosen, Filters):
        return runnable_tasks(catalogue, chosen)
    for name in chosen:
        catalogue.find(name)
    return list(chosen)


def _report(result: Result[int | None], options: ProgramOptions, *, is_single: bool) -> None:
    """Print what has become of an attempt."""
    verdict = result.verdict
    if result.failure is not None:
        report(f"{result.task}, attempt {result.attempt + 1}: {result.failure}")
    if is_single and verdict is not None:
        print_json(verdict.raw)
    elif options.as_json:
        entry = {
            "task": result.task,
            "attempt": result.attempt,
            "episode": result.episode,
            "exit_status": result.played,
            "seconds": round(result.seconds, 3),
            "verdict": None if verdict is None else verdict.raw,
            "failure": None if result.failure is None else str(result.failure),
        }
        print_json(entry, indent=None)
        sys.stdout.flush()
