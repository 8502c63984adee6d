"""Loading a suite from a checkout: its settings, its servers, its tasks, their splits, and what tasks share.

Tasks share accounts (`accounts` in suite.yaml) and conflict groups (`conflicts` in suite.yaml, and
Toolathlon's `tasks/<split>/task_conflict.json`) outside of their sandboxes, which limits how many of them run
at once.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.documents import read_json, read_yaml, validate
from decathlon_mcp.suites.profile import packaged_profiles, profile_folders
from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.servers import read_servers
from decathlon_mcp.suites.suite import SINGLE_SLOT, SharedResource, Suite
from decathlon_mcp.suites.suite_file import Account, read_suite_file
from decathlon_mcp.suites.tasks import (
    CONFIG,
    FOLDER,
    Task,
    find_task_folders,
    read_task,
    task_ids,
)
from decathlon_mcp.types import JsonObject, Language

log = logging.getLogger("decathlon.suites")

STARTER = Path(__file__).parent.parent / "starter" / "suite"
TRAIN_PERCENT = 80
CONFLICT_FILE = "task_conflict.json"


class _Conflicts(BaseModel):
    conflict_groups: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()


_CONFLICTS = TypeAdapter(_Conflicts)


def load_suite(where: str | Path, language: Language = "en") -> Suite:
    """Load the suite in a checkout; `starter` is the bundled suite.

    Errors in the files of a task or a server are kept in the tasks that they concern. Raises SuiteError for a
    folder that is no suite, naming what was looked for and where, and for errors in `suite.yaml` and
    `task_conflict.json`.
    """
    path = STARTER if str(where) == "starter" else Path(where).expanduser().absolute()
    folders = find_task_folders(path)
    if not folders:
        raise _no_suite(path)
    profile, settings = read_suite_file(path)
    servers, server_errors = read_servers(path)
    resources = SuiteResources(path, profile, settings, servers, server_errors)
    folder_name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-.")
    name = settings.name or folder_name or profile.name
    tasks = {
        task_id: _with_settings(read_task(task_id, name, path, folder, language), resources)
        for task_id, folder in zip(task_ids(folders), folders, strict=True)
    }
    _warn_of_unmatched_patterns(resources, tasks)
    groups = [*read_conflicts(path / FOLDER), *settings.conflicts]
    return Suite(
        name=name,
        path=path,
        profile=profile,
        tasks=tasks,
        resources=resources,
        language=language,
        _shared=shared_resources(name, tasks, groups, resources),
    )


def _with_settings(task: Task, resources: SuiteResources) -> Task:
    """A task as its folder describes it, with the settings of its suite and the errors of its servers."""
    settings, profile = resources.settings.task(task.id), resources.profile
    errors = resources.server_errors
    needs = resources.needs(task, settings)
    return replace(
        task,
        needs=needs,
        splits=splits_of(task.id, resources.settings.splits, profile.name),
        in_place=bool(settings.in_place),
        spared=settings.spared or (),
        leaves_running=profile.leaves_running if settings.leaves_running is None else settings.leaves_running,
        preprocess_sandbox=settings.preprocess_sandbox or profile.preprocess_sandbox,
        kept=settings.kept,
        eager_servers=tuple(
            name for name in needs.servers if settings.eager or resources.server_needs(name).eager
        ),
        grader_network=needs.network if settings.grader_network is None else settings.grader_network,
        deadlines=settings.deadlines,
        errors=(*task.errors, *(errors[name] for name in task.needs.servers if name in errors)),
    )


def _warn_of_unmatched_patterns(resources: SuiteResources, tasks: Collection[str]) -> None:
    """Log the patterns of suite.yaml that match no task; they are probably misspelled."""
    settings = resources.settings
    # A packaged profile names tasks of the original suite, which a checkout of part of it does not have.
    packaged: JsonObject = packaged_profiles()[resources.profile.name].get("accounts", {})
    from_profile = {pattern for account in packaged.values() for pattern in account.get("tasks", ())}
    in_accounts = {pattern for account in settings.accounts.values() for pattern in account.tasks}
    fields: tuple[tuple[str, Iterable[str]], ...] = (
        ("conflicts", (pattern for group in settings.conflicts for pattern in group)),
        ("accounts", sorted(in_accounts - from_profile)),
        ("splits", (pattern for patterns in settings.splits.values() for pattern in patterns)),
    )
    for field, patterns in fields:
        for pattern in patterns:
            if not any(fnmatchcase(task_id, pattern) for task_id in tasks):
                log.warning(
                    "suite.yaml names a task that does not exist",
                    extra={"fields": {"field": field, "task": pattern}},
                )


def _no_suite(path: Path) -> SuiteError:
    looked_for = f"looked for {FOLDER}/<split>/<task>/{CONFIG} in {path}"
    if not path.is_dir():
        fault = "is not a folder" if path.exists() else "does not exist"
        return SuiteError(f"{path} {fault}; a suite is a checkout in Toolathlon's layout: {looked_for}")
    entries = sorted(path.iterdir())
    content = ", ".join([entry.name for entry in entries][:12]) or "nothing"
    nearby = next((place for place in (*path.parents[:3], *entries) if find_task_folders(place)), None)
    hint = f"; did you mean {nearby}?" if nearby else ""
    return SuiteError(f"{path} is not a checkout in Toolathlon's layout: {looked_for}; found {content}{hint}")


@cache
def packaged_splits(profile: str) -> Mapping[str, str]:
    """The split of each task that a profile's list names. `docs/splits.py` makes the lists."""
    paths = (folder / "splits" / f"{profile}.yaml" for folder in profile_folders())
    lists = [read_yaml(path) for path in paths if path.is_file()]
    return {task: split for each in lists for split, tasks in each.items() for task in tasks}


def splits_of(task_id: str, lists: Mapping[str, Sequence[str]], profile: str = "") -> tuple[str, ...]:
    """The splits of a task, from the suite's own lists, else from its profile's list.

    A task that neither lists is in `train` or `test`, by a hash of its id, 80 to 20.
    """
    # The folder below `tasks/` is no split in this sense: upstream keeps all its tasks in `finalpool`.
    if lists:
        return tuple(
            name
            for name, patterns in lists.items()
            if any(fnmatchcase(task_id, pattern) for pattern in patterns)
        )
    if (split := packaged_splits(profile).get(task_id)) is not None:
        return (split,)
    number = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") % 100
    return ("train",) if number < TRAIN_PERCENT else ("test",)


def read_conflicts(tasks: Path) -> list[tuple[str, ...]]:
    """The groups of all `tasks/<split>/task_conflict.json`. Raises SuiteError naming file, line and field."""
    return [
        group
        for path in sorted(tasks.glob(f"*/{CONFLICT_FILE}"))
        for group in validate(path, _CONFLICTS, read_json(path)).conflict_groups
    ]


def shared_resources(
    suite: str, tasks: Mapping[str, Task], groups: Iterable[Sequence[str]], resources: SuiteResources
) -> dict[str, tuple[SharedResource, ...]]:
    """The shared resources of each task that has any. `groups`: conflict groups, as task ids or patterns.

    Two episodes of one task share its resources as two different tasks would.
    """
    shared: dict[str, list[SharedResource]] = {}
    for patterns in groups:
        members = [task for task in tasks if any(fnmatchcase(task, pattern) for pattern in patterns)]
        name = f"the conflict group of {', '.join(members)}"
        for task in members:
            shared.setdefault(task, []).append(SharedResource(f"{suite}: {name}", name))
    for task in tasks.values():
        for name, account in resources.accounts(task).items():
            shared.setdefault(task.id, []).append(_account(suite, name, account, task, resources))
    return {task: tuple(dict.fromkeys(items)) for task, items in shared.items()}


def _account(
    suite: str, name: str, account: Account, task: Task, resources: SuiteResources
) -> SharedResource:
    key = f"{suite}: account {name}"
    if account.told_by is not None:
        key = f"{key} {_distinguishing_value(account.told_by, task, resources)}"
    return SharedResource(key, f"the account {name}", account.slot_names or SINGLE_SLOT, name)


def _distinguishing_value(token: str, task: Task, resources: SuiteResources) -> str:
    """The token's value, or the task's id where the task's own token file computes it."""
    value = resources.token_values_for(task).get(token)
    if value:
        return value
    return f"of {task.id}" if token in resources.own_token_values(task) else ""
