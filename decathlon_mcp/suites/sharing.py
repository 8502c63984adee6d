"""What tasks share outside of their sandboxes, so that only so many of them may run at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.suite_file import Account
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.suites.tokens import Reading, read_task

ONE = ("",)
"""The only slot of what no two tasks may use at once."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Something that tasks have in common: an account, a conflict group.

    `slots`: as many at once, each with one of its own. `name` is for people, `account` the one of the
    suite's settings that it is. Two are the same where their keys are.
    """

    key: str
    name: str
    slots: tuple[str, ...] = ONE
    account: str | None = None


def shared_of(
    suite: str, tasks: Mapping[str, Task], groups: Iterable[Sequence[str]], resources: SuiteResources
) -> dict[str, tuple[Shared, ...]]:
    """For each task what it shares; a group's words are ids or patterns.

    A task that shares with others what is outside of its sandbox shares it with a second episode of itself
    as well. Tasks without are left out.
    """
    found: dict[str, list[Shared]] = {}
    for words in groups:
        members = [name for name in tasks if any(fnmatchcase(name, word) for word in words)]
        name = f"the conflict group of {', '.join(members)}"
        group = Shared(f"{suite}: {name}", name)
        for name in members:
            found.setdefault(name, []).append(group)
    for name, account in resources.settings.accounts.items():
        for task in tasks.values():
            if account.is_of(task.id, task.needs.servers):
                found.setdefault(task.id, []).append(_shared(suite, name, account, task, resources))
    return {name: tuple(dict.fromkeys(shared)) for name, shared in found.items()}


def _shared(suite: str, name: str, account: Account, task: Task, resources: SuiteResources) -> Shared:
    key = f"{suite}: account {name}"
    if account.told_by is not None:
        key = f"{key} {_told(account.told_by, task, resources)}"
    return Shared(key, f"the account {name}", account.slot_names or ONE, name)


def _told(value: str, task: Task, resources: SuiteResources) -> str:
    """Which of several accounts it is: by the value or, where the task's own file computes it, the task."""
    own: Reading = read_task(resources.checkout / task.folder) if task.has_token_file else {}
    said = {**resources.tokens, **own}.get(value)
    return said or (f"of {task.id}" if value in own else "")
