"""`run`: play tasks with an agent's program or a model, each several times, and show how often it succeeds.

What has a verdict in the state folder under the same run is not played again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shlex
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio.to_thread
from decathlon_client import ClientError, Decathlon
from decathlon_client.batch_results import Result
from decathlon_client.client_values import ATTEMPT, Verdict
from decathlon_client.process import shutdown_on_signal
from decathlon_client.resume import AttemptKey, RevisionError, Revisions

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, runnable_tasks
from decathlon_mcp.cli.output import print_json, print_table, printed, shell_path, this_command
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, DecathlonError, ProviderUnavailableError
from decathlon_mcp.plugins.agents.agent_programs import Program, choose_variables, find_program
from decathlon_mcp.plugins.agents.launch import Launcher, NamespaceLauncher, TrustedLauncher, check_version
from decathlon_mcp.plugins.agents.player import (
    AgentPlayer,
    ModelFailedError,
    ModelPlayer,
    ProgramFailedError,
    model_endpoint,
)
from decathlon_mcp.plugins.agents.reach import read_endpoints
from decathlon_mcp.plugins.agents.serving import embedded_server, report_isolation, with_longer_lives
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.list_runs import estimate_text
from decathlon_mcp.plugins.history.values import EpisodeQuery, Sums
from decathlon_mcp.plugins.play import connect, redirect_logs
from decathlon_mcp.sandboxes.host.isolation import why_unavailable
from decathlon_mcp.sandboxes.host.plugin import answer_folders
from decathlon_mcp.sandboxes.machine_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings, default_state
from decathlon_mcp.storage.lock import create_state_folder

AGAIN_LABEL, WITHOUT_CALLS = "again", "without_calls"
"""The label of each episode that says which attempts of the same run were discarded to be played again."""
LOCKS = "runs.lock"
"""A file in the state folder of which each run that plays has locked one byte."""

Attempts: TypeAlias = Mapping[str, Mapping[int, Result[Any]]]
"""The results of each task by the number of the attempt, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAgent:
    """An agent's program, and how it is run."""

    command: Sequence[str]
    urls: tuple[str, ...] = ()
    """Of its model."""
    shown: tuple[Path, ...] = ()
    """Folders that it sees besides its own."""
    variables: tuple[str, ...] = ()
    """See `choose_variables`."""
    lists_withheld: bool = False
    """Whether the variables that it does not get are named on stderr, and not only counted."""
    trusted: bool = False
    """Whether it runs as an ordinary process."""

    @property
    def name(self) -> str:
        return Path(self.command[0]).name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAgent:
    """A model behind an OpenAI-compatible endpoint. `base_url`: see `model_endpoint`."""

    model: str
    base_url: str | None
    turns: int

    @property
    def name(self) -> str:
        return self.model.rpartition("/")[2] or self.model


Agent: TypeAlias = ProgramAgent | ModelAgent
Player: TypeAlias = AgentPlayer | ModelPlayer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is played, and how it is shown."""

    tasks: Sequence[str] | TaskFilter
    """Their ids, or filters for all that can run here."""
    attempts: int
    """At each task."""
    jobs: int
    """Attempts at once."""
    seconds: float
    """Time limit of an attempt."""
    run: str | None
    """The run's name; None for `default_run`."""
    url: str | None
    """A server that runs already; None for one in this process."""
    again_without_calls: bool
    """Whether attempts without a call are played again."""
    as_json: bool
    launch_time: str | None
    labels: Mapping[str, str]


class StoredAttempts:
    """The attempts of a run that have a verdict in a state folder; a batch's `VerdictRecord`.

    Of several verdicts on an attempt, which `--again-without-calls` makes, the newest counts.
    `without_calls`: whether verdicts on attempts without a call or a claim count. Blocks while it is made.
    Raises SettingsError.
    """

    def __init__(self, state: Path, run: str, *, without_calls: bool) -> None:
        self.run = run
        self.discarded = 0
        """Verdicts on attempts without a call that do not count."""
        self._results: dict[AttemptKey, Result[Any]] = {}
        self._launch_times: dict[str, str | None] = {}
        self._revisions = Revisions(f"the run {printed(run)}")
        history = EpisodeHistory([state])
        # The episodes that have a reward, the newest first.
        for summary in history.all_episodes(EpisodeQuery(run=run, live=False, lost=False)):
            number = summary.labels.get(ATTEMPT, "")
            if not (number.isascii() and number.isdecimal() and len(number) < 10):
                continue
            place = AttemptKey(summary.task, 0, int(number))
            details = None if place in self._results else history.episode(summary.public_id)
            if details is None or details.verdict is None:
                continue
            verdict = Verdict.read(details.verdict)
            if not without_calls and is_without_call(verdict):
                self.discarded += 1
                continue
            self._revisions.check(summary.task, verdict.raw)
            self._launch_times.setdefault(summary.task, details.launch_time)
            self._results[place] = Result(
                index=0,
                task=place.task,
                group=0,
                attempt=place.attempt,
                episode=summary.public_id,
                played=None,
                verdict=verdict,
                failure=None,
                fault=None,
                seconds=(summary.ended_at or summary.started_at) - summary.started_at,
                resumed=True,
            )

    def count(self, tasks: list[str], attempts: int) -> int:
        """How many of these attempts have a verdict."""
        wanted = set(tasks)
        return sum(place.task in wanted and place.attempt < attempts for place in self._results)

    def launch_time(self, task: str, occurrence: int) -> str | None:
        return self._launch_times.get(task)

    def result(self, place: AttemptKey, index: int, group: int) -> Result[Any] | None:
        known = self._results.get(place)
        return known and replace(known, index=index, group=group)

    def append(self, place: AttemptKey, result: Result[Any], run: str, launch_time: str | None) -> None:
        # The server has written its row.
        if result.verdict is not None:
            self._revisions.check(place.task, result.verdict.raw)


def is_without_call(verdict: Verdict) -> bool:
    """Whether a verdict is on an attempt that ended before its agent made a call or a claim."""
    return not verdict.metrics.get("calls") and not verdict.raw.get("claimed")


@contextmanager
def playing_alone(state: Path, run: str) -> Generator[None]:
    """Let no other process play this run while the body runs. Raises BadRequestError, SettingsError."""
    create_state_folder(state)
    # One byte for each run: a file for each would have to be removed, which no lock survives.
    place = int.from_bytes(hashlib.sha256(run.encode()).digest()[:7])
    with (state / LOCKS).open("a+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if not isinstance(error, (BlockingIOError, PermissionError)):
                raise
            raise BadRequestError(
                f"the run {printed(run)} is being played by another process; --run names another one"
            ) from None
        yield


async def run_agents(settings: Settings, agent: Agent, options: RunOptions) -> int:
    """Play what has no verdict yet, and print what there is; 0 if every attempt has a verdict, else 1.

    Raises DecathlonError.
    """
    raise_descriptor_limit()
    server = None if options.url is not None else with_longer_lives(settings, options.seconds)
    run = options.run or default_run(agent, options.url or settings.suite)
    results: dict[str, dict[int, Result[Any]]] = {}
    tasks: list[str] = []
    async with shutdown_on_signal() as watcher:
        try:
            with playing_alone(settings.state, run), redirect_logs(server):
                record = await anyio.to_thread.run_sync(
                    lambda: StoredAttempts(settings.state, run, without_calls=not options.again_without_calls)
                )
                async with AsyncExitStack() as stack:
                    # Before the server: it would make another error of a mistake.
                    if server is not None:
                        tasks = await anyio.to_thread.run_sync(_task_ids, server, options.tasks)
                    player = await _player(stack, settings, agent, options.seconds)
                    d = await stack.enter_async_context(connect(server, options.url))
                    if server is None:
                        tasks = await _listed_tasks(d, options.tasks)
                    if isinstance(player, AgentPlayer):
                        assert server is not None, "the command line has refused it"
                        player.server = await stack.enter_async_context(embedded_server(d, server))
                        player.shows_output = len(tasks) == options.attempts == 1
                    _announce(run, tasks, options, record)
                    if server is not None:
                        report_isolation(d, tasks)
                    await _play(d, run, tasks, player, record, options, results)
                    _report_without_calls(player, _all(results))
        except ClientError as error:
            raise DecathlonError(error.message) from error
        except RevisionError as error:
            raise BadRequestError(str(error)) from None
    played = _all(results)
    missing = len(tasks) * options.attempts - sum(result.verdict is not None for result in played)
    if not options.as_json and played:
        _print_table(results, options.attempts)
    _report_failures(played)
    if missing:
        report(f"without a verdict: {_number(missing, 'attempt')}; the same command plays what is missing")
    if not options.as_json and played:
        _print_look(run, played, settings.state)
    if watcher.status is not None:
        return watcher.status
    return 1 if missing else 0


def default_run(agent: Agent, server: object) -> str:
    """The name of a run, the same for the same agent on the same suites: what was played is found by it.

    `server`: the suites, or the URL of a server.
    """
    what = [*agent.command] if isinstance(agent, ProgramAgent) else [agent.model, agent.base_url, agent.turns]
    digest = hashlib.sha256(json.dumps([what, server]).encode()).hexdigest()
    return f"{agent.name[:60]}-{digest[:8]}"


async def _listed_tasks(d: Decathlon, chosen: Sequence[str] | TaskFilter) -> list[str]:
    """The tasks to be played on a server that runs already. Raises BadRequestError, ClientError."""
    if isinstance(chosen, TaskFilter):
        listed = await d.tasks(prompts=False, **chosen.model_dump(exclude_none=True, exclude_defaults=True))
        return [task.id for task in listed if task.runnable]
    known = {task.id for task in await d.tasks(prompts=False)}
    if unknown := [name for name in chosen if name not in known]:
        raise BadRequestError(f"that server has no task {', '.join(map(printed, unknown))}")
    return list(dict.fromkeys(chosen))


def _task_ids(settings: Settings, chosen: Sequence[str] | TaskFilter) -> list[str]:
    """The tasks to be played here. Raises UnknownTaskError, BadRequestError if none fits, SuiteError."""
    catalogue = read_catalogue(settings)
    if isinstance(chosen, TaskFilter):
        return runnable_tasks(catalogue, chosen)
    for name in chosen:
        catalogue.find(name)
    return list(dict.fromkeys(chosen))


async def _player(stack: AsyncExitStack, settings: Settings, agent: Agent, seconds: float) -> Player:
    """What plays for an agent, without a server yet. Raises BadRequestError, ProviderUnavailableError."""
    if isinstance(agent, ModelAgent):
        endpoint = await stack.enter_async_context(model_endpoint(agent.base_url))
        return ModelPlayer(model=agent.model, turns=agent.turns, endpoint=endpoint)
    variables, withheld = choose_variables(agent.name, agent.variables)
    program, launcher = await anyio.to_thread.run_sync(_find_program, settings, agent, variables)
    version = await check_version(program, launcher, variables)
    _report_withheld(withheld, agent.lists_withheld)
    return AgentPlayer(
        program=program, launcher=launcher, variables=variables, version=version, seconds=seconds
    )


def _find_program(
    settings: Settings, agent: ProgramAgent, variables: Mapping[str, str]
) -> tuple[Program, Launcher]:
    """The program and how it is started. Raises BadRequestError, ProviderUnavailableError."""
    # Without the program, what it would need is of no use.
    program = find_program(agent.command, isolated=False)
    if agent.trusted:
        return program, TrustedLauncher()
    if reason := why_unavailable():
        raise ProviderUnavailableError(
            f"the program cannot be kept from the state folder and the tasks' answers here: {reason}. With "
            "--trust-command it runs as an ordinary process, and each verdict's labels say so"
        )
    hidden = [*answer_folders(settings), default_state()]
    program = find_program(agent.command, shown=agent.shown, hidden=hidden, isolated=True)
    return program, NamespaceLauncher(program, read_endpoints(agent.urls, program.name, variables), hidden)


async def _play(
    d: Decathlon,
    run: str,
    tasks: Sequence[str],
    player: Player,
    record: StoredAttempts,
    options: RunOptions,
    results: dict[str, dict[int, Result[Any]]],
) -> None:
    """Play the attempts, and keep each result as soon as it is there."""
    again = {AGAIN_LABEL: WITHOUT_CALLS} if options.again_without_calls else {}
    async with d.batch(
        tasks,
        concurrency=options.jobs,
        n=options.attempts,
        run=run,
        progress=False,
        # A program's player keeps the limit itself.
        player_seconds=options.seconds if isinstance(player, ModelPlayer) else None,
        resume=record,
        launch_time=options.launch_time,
        labels={**options.labels, **player.labels, **again},
    ) as batch:
        async for result in batch.run(player):
            results.setdefault(result.task, {})[result.attempt] = result
            if options.as_json:
                _print_result(result)
            if not result.resumed:
                report(f"{_name(result)}: {_outcome(result)}")


def _all(results: Attempts) -> list[Result[Any]]:
    return [result for attempts in results.values() for result in attempts.values()]


def _announce(run: str, tasks: list[str], options: RunOptions, record: StoredAttempts) -> None:
    if record.discarded:
        what = "attempts that made no call are played again"
        report(f"{record.discarded} {what}; the label `{AGAIN_LABEL}` says so")
    done, total = record.count(tasks, options.attempts), len(tasks) * options.attempts
    have = f", {done} of them with a verdict already" if done else ""
    hint = "; --run NAME begins another run" if done == total else ""
    report(f"run {printed(run)}: {_number(total, 'attempt')} at {_number(len(tasks), 'task')}{have}{hint}")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _name(result: Result[Any]) -> str:
    return f"{printed(result.task)}, attempt {result.attempt + 1}"


def _outcome(result: Result[Any]) -> str:
    if result.verdict is None:
        return f"no verdict: {_failure(result)}"
    success = "" if result.verdict.success else ", failed"
    return f"reward {result.verdict.reward:g}{success} ({result.seconds:.0f} s)"


def _failure(result: Result[Any]) -> BaseException | None:
    """What has failed; of a player here the error itself, whose place in this code tells nobody anything."""
    failure = result.failure
    inner = None if failure is None else failure.__cause__
    return inner if isinstance(inner, (ProgramFailedError, ModelFailedError)) else failure


def _print_result(result: Result[Any]) -> None:
    entry = {
        "task": result.task,
        "attempt": result.attempt,
        "episode": result.episode,
        "played": result.played,
        "seconds": round(result.seconds, 3),
        "resumed": result.resumed,
        "verdict": None if result.verdict is None else result.verdict.raw,
        "failure": None if result.failure is None else str(_failure(result)),
    }
    print_json(entry, indent=None)
    sys.stdout.flush()


def _print_table(results: Attempts, attempts: int) -> None:
    """Print a line for each task with the reward of each attempt, and pass@1.

    pass@1 is the mean over tasks of the share of successes among attempts with a verdict.
    """
    numbers = range(attempts)
    rows: list[list[str]] = []
    rates: list[float] = []
    for task in sorted(results):
        verdicts = [result.verdict for result in results[task].values() if result.verdict is not None]
        rate = Sums.of_shares(sum(verdict.success for verdict in verdicts), len(verdicts)).mean
        cells = [_cell(results[task].get(number)) for number in numbers]
        rows.append([task, *cells, "-" if rate is None else f"{rate:.3f}"])
        if rate is not None:
            rates.append(rate)
    print_table(["task", *(f"#{number + 1}" for number in numbers), "pass@1"], rows)
    of_tasks = f"mean over {_number(len(rates), 'task')}"
    error = " with its standard error" if len(rates) > 1 else ""
    sys.stdout.write(f"pass@1 {estimate_text(Sums.of(rates).estimate)} ({of_tasks}{error})\n")


def _cell(result: Result[Any] | None) -> str:
    if result is None:
        return "-"
    return "lost" if result.reward is None else f"{result.reward:g}"


def _report_failures(results: Sequence[Result[Any]]) -> None:
    lost = [result for result in results if result.verdict is None]
    if lost:
        report(f"lost, and not counted as 0: {'; '.join(map(_name, lost))}")


def _print_look(run: str, results: Sequence[Result[Any]], state: Path) -> None:
    """Print the commands that show the run and an attempt of it, first of all one that was lost or failed."""
    command = this_command()
    where = "" if state == default_state() else f" --state {shell_path(state)}"
    sys.stdout.write(f"{command} view --open {shell_path(state)}\n")
    sys.stdout.write(f"{command} runs {shlex.quote(run)}{where}\n")
    shown = [result for result in results if result.episode]
    if shown:
        worst = min(shown, key=lambda result: -1.0 if result.reward is None else result.reward)
        sys.stdout.write(f"{command} show {worst.episode}{where}    # {_name(worst)}\n")


def _ended_before_a_call(result: Result[Any]) -> bool:
    if result.verdict is None:
        return isinstance(_failure(result), ProgramFailedError)
    return is_without_call(result.verdict)


def _report_without_calls(player: Player, results: Sequence[Result[Any]]) -> None:
    """Say so if all attempts of a program ended before a call: it may lack a key."""
    early = [*map(_ended_before_a_call, results)]
    if isinstance(player, AgentPlayer) and early and all(early):
        which = "the attempt" if len(early) == 1 else "every attempt"
        last = player.last_output or "(none was started now)"
        report(f"{which} ended before a call; the program's output ends with: {last}")


def _report_withheld(names: Sequence[str], lists: bool) -> None:
    """Report how many variables the program does not get; `lists`: by their names."""
    if not names:
        return
    count = f"{_number(len(names), 'variable')} withheld from the program; --env NAME gives it one"
    report(f"{count}: {', '.join(map(printed, names))}" if lists else f"{count}, --list-withheld names them")
