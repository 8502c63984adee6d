"""`serve-episode`: let an agent's program play a task, or a table of tasks, and grade what it has done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from decathlon_client import ClientError, Decathlon
from decathlon_client.embedded import EmbeddedEndpoint
from decathlon_client.results import Result, Summary
from decathlon_client.shutdown import shutdown_on_signal
from starlette.types import ASGIApp

from decathlon_mcp.agents.launch import Launcher, NamespaceLauncher, TrustedLauncher
from decathlon_mcp.agents.player import AgentPlayer
from decathlon_mcp.agents.programs import Program, find_program
from decathlon_mcp.agents.reach import read_endpoints
from decathlon_mcp.app import answer_folders, read_catalogue
from decathlon_mcp.catalogue.draws import Filters, filter_tasks
from decathlon_mcp.cli.episode import NO_VERDICT, NOT_PASSED
from decathlon_mcp.cli.output import print_json
from decathlon_mcp.cli.play import connect, redirect_logs
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, DecathlonError, ProviderUnavailableError
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.protocol import ConnectionLimits
from decathlon_mcp.sandboxes.bubblewrap.host_provider import why_unavailable
from decathlon_mcp.sandboxes.kernel_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings, default_state

AGENT_LABEL, ISOLATION_LABEL = "agent", "agent_isolation"
"""Labels of each episode: the program's name, and what kept it from the state folder."""
WAIT_SECONDS = 60.0
"""How much longer than an attempt an episode lives without a request, so that a program that has stopped to
play is ended by its own time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """How programs are run. `seconds`: what an attempt may take. `urls`: of their model. `shown`: folders.

    `attempts` at each task, `concurrency` at once. `resume`: file with verdicts, see `Decathlon.batch`.
    """

    seconds: float
    urls: tuple[str, ...] = ()
    shown: tuple[Path, ...] = ()
    trusted: bool = False
    attempts: int = 1
    concurrency: int = 1
    resume: Path | None = None
    as_json: bool = False
    labels: Mapping[str, str]


async def serve_episode(
    settings: Settings, chosen: Sequence[str] | Filters, command: Sequence[str], options: ProgramOptions
) -> int:
    """Play tasks with the command; returns the exit status. Raises DecathlonError.

    `chosen`: their ids, or filters for all that can run here.

    0 if every attempt has succeeded, `NOT_PASSED` if one has not, `NO_VERDICT` if one has no verdict.
    """
    program, launcher = _prepare(settings, command, options)
    raise_descriptor_limit()
    lives = {
        "idle_seconds": options.seconds + WAIT_SECONDS,
        "first_use_seconds": options.seconds + WAIT_SECONDS,
    }
    longer = {name: max(getattr(settings, name), seconds) for name, seconds in lives.items()}
    server = settings.model_copy(update=longer)
    tasks = await anyio.to_thread.run_sync(_task_ids, server, chosen)
    counts, results = Counter[int](), list[Result[int]]()
    is_single = len(tasks) == 1 and options.attempts == 1
    async with shutdown_on_signal() as watcher:
        try:
            with redirect_logs(server):
                async with connect(server, None) as d, _served(d, server) as (app, limits):
                    player = AgentPlayer(
                        d, app, limits, program, launcher, options.seconds, shows_output=is_single
                    )
                    async with d.batch(
                        tasks,
                        concurrency=options.concurrency,
                        n=options.attempts,
                        progress=not is_single,
                        player_seconds=options.seconds,
                        resume=options.resume,
                        labels={
                            **options.labels,
                            AGENT_LABEL: program.name,
                            ISOLATION_LABEL: launcher.isolation,
                        },
                    ) as batch:
                        async for result in batch.run(player):
                            results.append(result)
                            counts[_report(result, options, is_single=is_single)] += 1
        except ClientError as error:
            raise DecathlonError(error.message) from error
        if not (is_single or options.as_json):
            sys.stdout.write(f"{Summary.of(results)}\n")
        return NO_VERDICT if counts[NO_VERDICT] else NOT_PASSED if counts[NOT_PASSED] else 0
    return watcher.status or 1


def _prepare(settings: Settings, command: Sequence[str], options: ProgramOptions) -> tuple[Program, Launcher]:
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
    return program, NamespaceLauncher(program, read_endpoints(options.urls, program.name), hidden)


@asynccontextmanager
async def _served(d: Decathlon, settings: Settings) -> AsyncGenerator[tuple[ASGIApp, ConnectionLimits]]:
    """The ASGI application of an embedded server, and the limits of its connections."""
    endpoint = d._server  # pyright: ignore[reportPrivateUsage]
    assert isinstance(endpoint, EmbeddedEndpoint)
    max_body_bytes = settings.max_body_mib << 20
    app = http_app(endpoint.registry, max_body_bytes=max_body_bytes)
    limits = ConnectionLimits.for_bodies(max_body_bytes, per_peer=settings.max_peer_connections)
    async with app.router.lifespan_context(app):
        yield app, limits


def _task_ids(settings: Settings, chosen: Sequence[str] | Filters) -> list[str]:
    """The tasks that are played. Raises UnknownTaskError, BadRequestError if none fits, SuiteError."""
    catalogue = read_catalogue(settings)
    if isinstance(chosen, Filters):
        entries = filter_tasks(catalogue, chosen)
        names = [name for name, suite, task in entries if catalogue.is_runnable(suite, task)]
        if not names:
            raise BadRequestError("no task fits these filters and can run here")
        return names
    for name in chosen:
        catalogue.find(name)
    return list(chosen)


def _report(result: Result[int], options: ProgramOptions, *, is_single: bool) -> int:
    """Print what has become of an attempt; returns the exit status for it alone."""
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
    if verdict is None:
        return NO_VERDICT
    return 0 if verdict.success else NOT_PASSED
