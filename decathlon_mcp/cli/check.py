"""`tasks --check`: of each task whether it can run here, and what is missing where it cannot."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from rich.console import Console
from rich.text import Text

from decathlon_mcp.app import bootstrap
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import Draw, filter_tasks
from decathlon_mcp.catalogue.listing import list_tasks
from decathlon_mcp.catalogue.requirements import PLURALS, MissingRequirement, broken_file
from decathlon_mcp.episodes.program_probe import probe_programs
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.loading import STARTER
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

LISTED = 8


async def check(settings: Settings, wanted: Draw, as_json: bool) -> int:
    """Print what each of the tasks lacks, on stdout; 0 only where all of them can run.

    For what the servers' programs lack a sandbox is opened for each suite and looked into. Raises
    SuiteError, SettingsError, BadRequestError.
    """
    catalogue, unseen = await _looked(settings)
    names = [name for name, _, _ in filter_tasks(catalogue, wanted)]
    lacking = {name: [*_lacks(catalogue, *catalogue.entry(name))] for name in names}
    if as_json:
        told = [{**task, **_told(lacking[task["id"]])} for task in list_tasks(catalogue, names)]
        sys.stdout.write(json.dumps({"tasks": told, "unseen": unseen}, indent=2, ensure_ascii=False) + "\n")
    else:
        _print(lacking, unseen)
    return 1 if any(lacking.values()) else 0


async def _looked(settings: Settings) -> tuple[Catalogue, JsonObject]:
    """The tasks, and by suite why it could not be looked for its servers' programs."""
    async with bootstrap(settings) as episodes:
        catalogue = episodes.catalogue
        suites = [suite for suite in catalogue.suites if suite.path != STARTER]
        looks = {
            suite.name: await probe_programs(episodes.sandbox_factory(suite.name), catalogue)
            for suite in suites
        }
    return catalogue, {name: why for name, why in looks.items() if why is not None}


def _lacks(catalogue: Catalogue, suite: Suite, task: Task) -> Iterator[MissingRequirement]:
    """With what only shows when the task's prompt is read, and its servers are made ready."""
    yield from (lacks := catalogue.missing_requirements(suite, task))
    if lacks:
        return
    try:
        root, now = suite.profile.root, datetime.now().astimezone()
        suite.prompt(task, root=root, launch_time=now, names=suite.profile.names)
        suite.server_specs(task, root=root, values=dict.fromkeys(suite.token_names(task), ""))
    except SuiteError as error:
        yield broken_file(suite, error, task.id)


def _told(lacks: list[MissingRequirement]) -> JsonObject:
    return {
        "runnable": not lacks,
        "missing": [lack.sentence for lack in lacks],
        "lacks": [lack.to_json() for lack in lacks],
    }


def summary(lacks: Iterable[MissingRequirement]) -> Iterator[str]:
    """A line for each kind: what of it is wanted most, and by how many tasks."""
    kinds: dict[str, Counter[str]] = {}
    for lack in lacks:
        kinds.setdefault(PLURALS[lack.kind], Counter())[lack.name] += 1
    for kind, wanted in kinds.items():
        named = ", ".join(f"{name} ({count})" for name, count in wanted.most_common(LISTED))
        yield f"{kind}: {named}{f', {len(wanted) - LISTED} more' if len(wanted) > LISTED else ''}"


def _print(lacking: dict[str, list[MissingRequirement]], unseen: JsonObject) -> None:
    console = Console(highlight=False)
    for name, lacks in lacking.items():
        mark = ("✗   ", "bold red") if lacks else ("ok  ", "green")
        console.print(Text.assemble(mark, (name, "bold")), soft_wrap=True)
        for lack in lacks:
            page = "" if lack.kind == "broken" else f"\n      → {lack.page}"
            console.print(Text.assemble(f"      {lack.message}", (page, "yellow")), soft_wrap=True)
    ready = sum(not lacks for lacks in lacking.values())
    console.print(f"\n{ready} of {len(lacking)} can run here", soft_wrap=True)
    for line in summary(lack for lacks in lacking.values() for lack in lacks):
        console.print(line, soft_wrap=True)
    for suite, why in unseen.items():
        console.print(f"{suite}: not looked for its servers' programs: {why}", soft_wrap=True)
