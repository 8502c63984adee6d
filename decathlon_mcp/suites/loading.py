"""Reading a suite from a checkout: its tasks, its servers, what its settings say of both."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.host import HostInfo
from decathlon_mcp.suites.profile import packaged
from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.servers import read_servers
from decathlon_mcp.suites.sharing import Shared, shared_of
from decathlon_mcp.suites.splits import read_conflicts, splits_of, warn_of_strangers
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.suite_file import read_suite_file
from decathlon_mcp.suites.tasks import (
    CONFIG,
    FOLDER,
    Folder,
    Task,
    find_folders,
    ids_of,
    parts_of,
    read_folder,
)
from decathlon_mcp.suites.tokens import TASK_FILE
from decathlon_mcp.types import JsonObject, Language

STARTER = Path(__file__).parent.parent / "starter" / "suite"


def load_suite(where: str | Path, here: HostInfo | None = None) -> Suite:
    """Read a checkout, whose tasks are to run `here`; `starter` is the bundled suite.

    Without a `suite.yaml` its profile is recognised by its marks (see `profile.recognise`). What is broken
    about a task or a server is kept with the tasks that it concerns. Raises SuiteError where the folder is no
    suite, saying what was looked for and where, or where `suite.yaml` or `task_conflict.json` is broken.
    """
    path = STARTER if str(where) == "starter" else Path(where).expanduser().absolute()
    folders = find_folders(path)
    if not folders:
        raise _no_suite(path)
    profile, said = read_suite_file(path)
    servers, errors = read_servers(path)
    resources = SuiteResources(path, profile, said, servers, errors)
    name = said.name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-.") or profile.name
    here = here or HostInfo()
    tasks = dict(_tasks(name, resources, folders, here.language))
    return Suite(name, path, profile, tasks, resources, _all_shared(name, path, resources, tasks), here)


def _tasks(
    suite: str, resources: SuiteResources, folders: Collection[PurePosixPath], language: Language
) -> Iterable[tuple[str, Task]]:
    for task_id, path in zip(ids_of([*folders]), folders, strict=True):
        yield task_id, _task(task_id, suite, resources, read_folder(resources.checkout, path), language)


def _task(task_id: str, suite: str, resources: SuiteResources, folder: Folder, language: Language) -> Task:
    said = resources.settings.task(task_id)
    needs = resources.needs(folder, said)
    return Task(
        id=task_id,
        suite=suite,
        folder=folder.path,
        needs=needs,
        splits=splits_of(task_id, resources.settings.splits, resources.profile.name),
        parts=parts_of(resources.checkout, folder, language),
        has_token_file=TASK_FILE in folder.names,
        in_place=bool(said.in_place),
        spared=said.spared or (),
        leaves_running=resources.profile.leaves_running
        if said.leaves_running is None
        else said.leaves_running,
        grader_network=needs.network if said.grader_network is None else said.grader_network,
        deadlines=said.deadlines,
        max_turns=folder.said.max_turns,
        meta=folder.said.meta or {},
        config=folder.config,
        names=folder.names,
        errors=(*folder.errors, *resources.errors(folder.said.servers)),
    )


def _all_shared(
    suite: str, path: Path, resources: SuiteResources, tasks: Mapping[str, Task]
) -> dict[str, tuple[Shared, ...]]:
    said = resources.settings
    packages: JsonObject = packaged()[resources.profile.name].get("accounts", {})
    profiles = {word for each in packages.values() for word in each.get("tasks", ())}
    named = {word for each in said.accounts.values() for word in each.tasks}
    warn_of_strangers(tasks, "conflicts", (word for group in said.conflicts for word in group))
    warn_of_strangers(tasks, "accounts", sorted(named - profiles))
    warn_of_strangers(tasks, "splits", (word for group in said.splits.values() for word in group))
    return shared_of(suite, tasks, [*read_conflicts(path / FOLDER), *said.conflicts], resources)


def _no_suite(path: Path) -> SuiteError:
    looked = f"looked for {FOLDER}/<split>/<task>/{CONFIG} in {path}"
    if not path.exists():
        return SuiteError(f"{path} is not there; a suite is a checkout in Toolathlon's layout: {looked}")
    if not path.is_dir():
        return SuiteError(f"{path} is not a folder; a suite is a checkout in Toolathlon's layout: {looked}")
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:12]) or "nothing"
    near = next(
        (place for place in (*path.parents[:3], *sorted(path.iterdir())) if find_folders(place)), None
    )
    hint = f"; did you mean {near}?" if near else ""
    return SuiteError(f"{path} is not a checkout in Toolathlon's layout: {looked}; found {found}{hint}")
