"""`tasks`: list the tasks (needs no engine), check what each one needs, or show what they share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import anyio.to_thread
from cyclopts import Parameter
from rich.text import Text

from decathlon_mcp.app import read_catalogue, sandbox_factories
from decathlon_mcp.catalogue.catalogue import Catalogue, list_tasks
from decathlon_mcp.catalogue.draws import TaskFilter, TaskSampler, filter_tasks
from decathlon_mcp.catalogue.requirements import PLURALS, MissingRequirement, broken_file
from decathlon_mcp.cli.options import (
    NO_FILTERS,
    SANDBOX_SETTINGS,
    Filters,
    Flag,
    run_async,
    settings_model,
)
from decathlon_mcp.cli.output import print_json, print_lines, print_table
from decathlon_mcp.cli.readiness import check_readiness
from decathlon_mcp.cli.terminal import Terminal
from decathlon_mcp.cli.usage import check_positive, report
from decathlon_mcp.errors import BadRequestError, SuiteError
from decathlon_mcp.grading.rubric import metrics_of
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.plugins.readiness.machine import format_finding
from decathlon_mcp.plugins.readiness.suites import GraderFinding
from decathlon_mcp.sandboxes.base import Finding
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.suite import SharedResource, Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

TasksOptions = settings_model(
    "TasksOptions", (*SANDBOX_SETTINGS, "language", "results", "network"), like="tasks"
)
TasksSettings = Annotated[TasksOptions, Parameter(name="*")]
TASKS_DEFAULTS = TasksOptions.model_validate({})


def tasks(
    *,
    sample: Annotated[int | None, Parameter(metavar="N", validator=check_positive)] = None,
    check: Flag = False,
    conflicts: Flag = False,
    json: Flag = False,
    filters: Filters = NO_FILTERS,
    settings: TasksSettings = TASKS_DEFAULTS,
) -> int:
    """List the tasks, their needs, and whether they can run here.

    Parameters
    ----------
    sample
        Draw this many of the tasks that can run here.
    check
        Also look into a sandbox and show what each task lacks. Exit status 0 only if nothing is missing.
    conflicts
        List the accounts and conflict groups that tasks share instead.
    json
        Print `{"tasks": [...], "suites": [...]}`. The `revision` of a suite covers the files of all tasks,
        the `suite_revision` of a verdict those of one.
    """
    if conflicts:
        return show_conflicts(settings, filters, as_json=json)
    if sample is None and filters.seed is not None:
        raise BadRequestError("--seed requires --sample")
    if check and sample is not None:
        raise BadRequestError("--sample and --check cannot be combined: --sample draws only runnable tasks")
    if check:
        return run_async(check_tasks, settings, filters, json)
    return show_tasks(settings, filters, sample=sample, as_json=json)


TaskNote: TypeAlias = tuple[str, JsonObject]
"""What a plug-in tells of a task: a text, and members of its JSON."""
MAX_NAMES = 8
"""Names that a summary line shows of each kind of missing requirement."""


def show_tasks(settings: Settings, filters: TaskFilter, *, sample: int | None, as_json: bool) -> int:
    """Print the tasks on stdout: a table on a terminal, tab-separated lines in a pipe, or JSON.

    Raises SuiteError, SettingsError, BadRequestError.
    """
    catalogue = read_catalogue(settings)
    if sample is None:
        names = [name for name, _, _ in filter_tasks(catalogue, filters)]
    else:
        names = TaskSampler(catalogue).take(filters, count=sample)
    if not names:
        _say_that_none_fits(catalogue, filters)
    tasks = list_tasks(catalogue, names, metrics=metrics_of(catalogue, names))
    if as_json:
        print_json({"tasks": tasks, "suites": _suites_to_json(catalogue)})
        return 0
    print_table(("task", "suite", "splits", "needs", ""), map(_cells, tasks))
    if sys.stdout.isatty():
        runnable = sum(task["runnable"] for task in tasks)
        _print_suites(catalogue, f"\n{len(tasks)} tasks, {runnable} can run here")
    return 0


def _suites_to_json(catalogue: Catalogue) -> list[JsonObject]:
    return [
        {
            "name": suite.name,
            "path": str(suite.path),
            "revision": suite.revision,
            **({} if suite.release is None else {"release": suite.release.name}),
        }
        for suite in catalogue.suites
    ]


def _print_suites(catalogue: Catalogue, *lines: str) -> None:
    """Print these lines, and where each suite is."""
    console = Terminal(highlight=False)
    for line in (*lines, *(f"{each.name}: {each.path} ({each.version_text})" for each in catalogue.suites)):
        console.print(line, markup=False, soft_wrap=True)


def _cells(task: JsonObject) -> list[str]:
    """Return id, suite, splits, servers and tools, and the reason why it cannot run."""
    tools = [*task["servers"], *(f"local:{tool}" for tool in task["local_tools"])]
    needs = [*tools, *(["network"] if task["network"] else [])]
    status = "runs here" if task["runnable"] else "; ".join(task["missing"])
    return [task["id"], task["suite"], ",".join(task["splits"]), ",".join(needs), status]


async def check_tasks(settings: Settings, filters: TaskFilter, as_json: bool) -> int:
    """Print what each task lacks and how it can run, on stdout; return 0 only if all of them can run.

    Opens a sandbox for each suite, and prints what else is wrong on this machine. Raises SuiteError,
    SettingsError, BadRequestError.
    """
    catalogue = await anyio.to_thread.run_sync(read_catalogue, settings)
    async with aclosing(look_into_sandboxes(catalogue, settings, "check")) as results:
        found = [result async for result in results if result.is_problem]
    broken = broken_tasks(found)
    # Findings about graders are among what their tasks lack.
    problems = [result for result in found if not isinstance(result, GraderFinding)]
    names = [name for name, _, _ in filter_tasks(catalogue, filters)]
    missing = {name: [*_missing_requirements(catalogue, *catalogue.entry(name), broken)] for name in names}
    ways = {name: way_to_run(*catalogue.entry(name), missing[name]) for name in names}
    notes = await anyio.to_thread.run_sync(_notes, settings, catalogue, names)
    if as_json:
        metrics = await anyio.to_thread.run_sync(metrics_of, catalogue, names)
        tasks = [
            {
                **task,
                **_missing_to_json(missing[task["id"]]),
                "how": ways[task["id"]].to_json(),
                **{name: value for _, members in notes[task["id"]] for name, value in members.items()},
            }
            for task in list_tasks(catalogue, names, metrics=metrics)
        ]
        findings = [result.to_json() for result in problems]
        print_json({"tasks": tasks, "suites": _suites_to_json(catalogue), "findings": findings})
    else:
        _print_missing(missing, ways, notes, problems)
        _print_suites(catalogue)
    if not names:
        _say_that_none_fits(catalogue, filters)
    cannot_serve = any(result.required and not result.ok for result in problems)
    return 1 if not names or any(missing.values()) or cannot_serve else 0


def _say_that_none_fits(catalogue: Catalogue, filters: TaskFilter) -> None:
    words: list[str] = []
    for name, value in filters.model_dump(include={*TaskFilter.model_fields} - {"seed"}).items():
        if value not in (None, ()):
            shown = ",".join(value) if name in ("needs", "without") else value
            words.append(f"--{name.replace('_', '-')} {shown}")
    report(f"none of the {len(catalogue)} tasks fits {' '.join(words)}")


async def look_into_sandboxes(
    catalogue: Catalogue, settings: Settings, command: str
) -> AsyncGenerator[Finding]:
    """Check this machine, and each suite in a sandbox. Raises SettingsError."""
    with tempfile.TemporaryDirectory(prefix=f"decathlon-{command}-") as folder:
        owner = f"{command}-{os.getpid()}"
        async with sandbox_factories(catalogue.suites, owner, settings, Path(folder)) as factories:
            async for result in check_readiness(catalogue, factories, settings.max_sandboxes):
                yield result


def broken_tasks(findings: Iterable[Finding]) -> dict[tuple[str, str], list[SuiteError]]:
    """The errors in rubrics and evaluators, by the names of the suite and the task."""
    broken: dict[tuple[str, str], list[SuiteError]] = {}
    for result in findings:
        if isinstance(result, GraderFinding):
            for task, error in result.errors.items():
                broken.setdefault((result.suite, task), []).append(error)
    return broken


def _missing_requirements(
    catalogue: Catalogue, suite: Suite, task: Task, broken: Mapping[tuple[str, str], list[SuiteError]]
) -> Iterator[MissingRequirement]:
    """Yield what the task lacks, including errors that only rendering its prompt and servers reveals."""
    yield from (missing := catalogue.missing_requirements(suite, task))
    for error in broken.get((suite.name, task.id), ()):
        yield broken_file(suite, error, task.id)
    if missing:
        return
    try:
        root, now = suite.profile.root, datetime.now().astimezone()
        suite.prompt(task, root=root, launch_time=now, names=suite.profile.names)
        suite.server_specs(task, root=root, values=dict.fromkeys(suite.token_names(task), ""))
    except SuiteError as error:
        yield broken_file(suite, error, task.id)


def _notes(settings: Settings, catalogue: Catalogue, names: Iterable[str]) -> dict[str, list[TaskNote]]:
    """The notes of plug-ins on these tasks. Blocks. Raises SettingsError."""
    parts = [load(part) for plugin in plugins() for part in plugin.task_notes]
    notes: dict[str, list[TaskNote]] = {}
    for name in names:
        made = (part(settings, *catalogue.entry(name)) for part in parts)
        notes[name] = [note for note in made if note is not None]
    return notes


def _missing_to_json(requirements: list[MissingRequirement]) -> JsonObject:
    return {
        "runnable": not requirements,
        "missing": [requirement.sentence for requirement in requirements],
        "lacks": [requirement.to_json() for requirement in requirements],
    }


def runnable_text(complete: int, count: int, obstacles: Sequence[str]) -> str:
    """How many of `count` tasks can run here.

    `complete`: the number of tasks that lack nothing. `obstacles`: findings without which no server starts.
    """
    if not obstacles:
        return f"{complete} of {count} can run here"
    return f"0 of {count} can run here without {', '.join(obstacles)}; {complete} lack nothing else"


def summarize_missing(requirements: Iterable[MissingRequirement]) -> Iterator[str]:
    """Yield a line per kind of requirement: the most needed names, each with its number of tasks."""
    counts: dict[str, Counter[str]] = {}
    for requirement in requirements:
        counts.setdefault(PLURALS[requirement.kind], Counter())[requirement.name] += 1
    for kind, names in counts.items():
        listed = ", ".join(f"{name} ({count})" for name, count in names.most_common(MAX_NAMES))
        yield f"{kind}: {listed}{f', {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''}"


def _print_missing(
    missing: dict[str, list[MissingRequirement]],
    ways: dict[str, WayToRun],
    notes: Mapping[str, list[TaskNote]],
    problems: Sequence[Finding],
) -> None:
    console = Terminal(highlight=False)
    for name, requirements in missing.items():
        mark = ("✗   ", "bold red") if requirements else ("ok  ", "green")
        text = "; ".join([ways[name].text, *(note for note, _ in notes[name])])
        console.print(Text.assemble(mark, (name, "bold"), f": {text}"), soft_wrap=True)
        for requirement in requirements:
            page = "" if requirement.kind == "broken" else f"\n      → {requirement.page}"
            console.print(Text.assemble(f"      {requirement.message}", (page, "yellow")), soft_wrap=True)
    complete = sum(not requirements for requirements in missing.values())
    obstacles = [problem.what for problem in problems if problem.required and not problem.ok]
    console.print(f"\n{runnable_text(complete, len(missing), obstacles)}", soft_wrap=True)
    for text, count in count_ways(ways.values()).items():
        console.print(f"  {count} {text}", soft_wrap=True)
    for line in summarize_missing(
        requirement for requirements in missing.values() for requirement in requirements
    ):
        console.print(line, soft_wrap=True)
    for problem in problems:
        console.print(format_finding(problem), soft_wrap=True)


def show_conflicts(settings: Settings, filters: TaskFilter, *, as_json: bool) -> int:
    """Print each shared account and conflict group with its tasks on stdout: one per line, or JSON.

    Raises SuiteError, SettingsError, BadRequestError.
    """
    catalogue = read_catalogue(settings)
    users: dict[SharedResource, list[str]] = {}
    names: list[str] = []
    for name, suite, task in filter_tasks(catalogue, filters):
        names.append(name)
        for shared in suite.shared_resources(task.id):
            users.setdefault(shared, []).append(name)
    if not names:
        _say_that_none_fits(catalogue, filters)
    if as_json:
        entries = [
            {"name": shared.name, "account": shared.account, "slots": len(shared.slots), "tasks": tasks}
            for shared, tasks in users.items()
        ]
        print_json({"shared": entries})
        return 0
    print_lines([line] for line in sorted(_conflict_lines(users)))
    if not names:
        return 0
    sharing = {name for tasks in users.values() for name in tasks}
    sys.stderr.write(f"{len(sharing)} of {len(names)} tasks share something; the others share nothing\n")
    return 0


def _conflict_lines(users: dict[SharedResource, list[str]]) -> Iterable[str]:
    """Yield a line per account or group; accounts of one kind with a single task each share a line."""
    single: dict[str, list[str]] = {}
    for shared, tasks in users.items():
        if len(tasks) == 1 and shared.account is not None:
            single.setdefault(shared.name, []).extend(tasks)
        else:
            yield f"{shared.name}: {len(shared.slots)} at a time of {', '.join(tasks)}"
    for name, tasks in single.items():
        yield f"{name}: one per task, each task once at a time: {', '.join(sorted(tasks))}"


WayName: TypeAlias = Literal["ready", "with a recording", "with a private service", "cannot run", "broken"]

READY: Final = "ready"
CANNOT_RUN: Final = "cannot run"
BROKEN: Final = "broken"
PRIVATE_SERVICES: Mapping[str, str] = {
    "canvas": "a private Canvas",
    "poste": "private mail",
    "postgres": "a private database",
    "woocommerce": "private shops",
}
"""Services that an episode can have to itself, with their names for people."""
SOLVED_BY_A_RECORDING = frozenset({"network", "recording"})
"""Kinds of requirements that a task with a recorded web does not have."""
KINDS: Mapping[str, str] = {
    "credential": "",
    "service": "the service ",
    "server": "the MCP server ",
    "package": "the program of the MCP server ",
    "local tool": "the local tool ",
    "text": "",
}
"""What is written before the name of a missing requirement, by its kind."""


@dataclass(frozen=True, slots=True)
class WayToRun:
    """How a task can run.

    `recording`: it needs the internet, or a recording of it. `to_record`: credentials that it lacks and that
    only recording takes. `services`: unhosted services that each episode can start for itself, as texts for
    people. `missing`: whatever else it lacks, as texts for people; with any, it cannot run, and its text has
    `to_record` among them. `broken`: files of the checkout with errors; with any, it cannot run either.
    """

    recording: bool = False
    to_record: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def name(self) -> WayName:
        """The way in one word; a task that takes a recording and a private service is `with a recording`."""
        if self.broken:
            return BROKEN
        if self.missing:
            return CANNOT_RUN
        if self.recording:
            return "with a recording"
        return "with a private service" if self.services else READY

    @property
    def text(self) -> str:
        """`ready`, `with …`, `cannot run: …` with what it lacks, or `broken: …`."""
        if self.broken:
            lacks = f"; {CANNOT_RUN}: {', '.join(self.missing)}" if self.missing else ""
            return f"{BROKEN}: {', '.join(self.broken)}{lacks}"
        if self.missing:
            # Without a network, such a task takes these as well.
            return f"{CANNOT_RUN}: {', '.join((*self.missing, *self.to_record))}"
        key = f" ({', '.join(self.to_record)} to record it)" if self.to_record else ""
        parts = [f"a recording{key}"] if self.recording else []
        parts += self.services
        return f"with {' and '.join(parts)}" if parts else READY

    def to_json(self) -> JsonObject:
        """The entry in the output of `tasks --check --json`."""
        return {"way": self.name, **asdict(self)}


def way_to_run(suite: Suite, task: Task, missing: Sequence[MissingRequirement]) -> WayToRun:
    """How a task can run that lacks these requirements."""
    recording = task.needs.network or task.grader_network
    recordable = {name.partition(".")[2] for name in suite.resources.settings.needed_to_record}
    # A file that is copied into the sandbox is named by its place in the checkout, once.
    sources = {
        target: str(file.relative_to(suite.path))
        for target, file in suite.resources.credential_files(task).items()
        if file.is_relative_to(suite.path)
    }
    to_record: list[str] = []
    others: list[str] = []
    broken: list[str] = []
    for requirement in missing:
        if requirement.kind == "service" and requirement.name in PRIVATE_SERVICES:
            continue
        if recording and requirement.kind in SOLVED_BY_A_RECORDING:
            continue
        if requirement.kind == "broken":
            file = Path(requirement.name)
            broken.append(str(file.relative_to(suite.path) if file.is_relative_to(suite.path) else file))
        elif recording and requirement.kind == "credential" and requirement.name in recordable:
            to_record.append(requirement.name)
        else:
            name = sources.get(requirement.name, requirement.name)
            others.append(f"{KINDS.get(requirement.kind, '')}{name}")
    services = [
        PRIVATE_SERVICES[name]
        for name, service in suite.services(task).items()
        # A service with an image runs in a sandbox of the episode, whether it is declared or not.
        if name in PRIVATE_SERVICES and (service.image is not None or not service.available)
    ]
    unique = tuple(dict.fromkeys(others)), tuple(dict.fromkeys(broken))
    return WayToRun(recording, tuple(to_record), tuple(services), *unique)


def count_ways(ways: Iterable[WayToRun]) -> dict[str, int]:
    """The number of tasks for each way; tasks with a missing requirement last, together."""
    counts: dict[str, int] = {}
    for way in ways:
        text = replace(way, to_record=()).text
        if way.missing or way.broken:
            text = BROKEN if way.broken else CANNOT_RUN
        counts[text] = counts.get(text, 0) + 1
    order: dict[str, int] = {READY: 0, CANNOT_RUN: 2, BROKEN: 3}
    return dict(sorted(counts.items(), key=lambda item: (order.get(item[0], 1), -item[1], item[0])))
