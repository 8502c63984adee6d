"""Resources that tasks share outside of their sandboxes and that limit how many of them run at once.

They are accounts (`accounts` in suite.yaml) and conflict groups (`conflicts` in suite.yaml, and Toolathlon's
`tasks/<split>/task_conflict.json`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter

from decathlon_mcp.suites.documents import read_json, validate
from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.suite_file import Account
from decathlon_mcp.suites.tasks import Task

CONFLICT_FILE = "task_conflict.json"
SINGLE_SLOT = ("",)
"""The slots of a resource that one task uses at a time."""


class _Conflicts(BaseModel):
    conflict_groups: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()


_CONFLICTS = TypeAdapter(_Conflicts)


@dataclass(frozen=True, slots=True)
class SharedResource:
    """An account or a conflict group. Each running task that uses it holds one of its slots.

    `key` identifies it, `name` is for messages; `account` is the name of its account in the suite's settings.
    """

    key: str
    name: str
    slots: tuple[str, ...] = SINGLE_SLOT
    account: str | None = None


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
