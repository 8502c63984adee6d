"""`tasks --conflicts`: what tasks share outside of their sandboxes, and so do not run side by side with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import Draw, filter_tasks
from decathlon_mcp.settings import Settings
from decathlon_mcp.suites.sharing import SharedResource


def show(settings: Settings, wanted: Draw, *, as_json: bool) -> int:
    """Print each account and conflict group with its tasks on stdout: a line each, or JSON.

    Raises SuiteError, SettingsError, BadRequestError.
    """
    catalogue = read_catalogue(settings)
    users: dict[SharedResource, list[str]] = {}
    names: list[str] = []
    for name, suite, task in filter_tasks(catalogue, wanted):
        names.append(name)
        for shared in suite.shared_resources(task.id):
            users.setdefault(shared, []).append(name)
    if as_json:
        told = [
            {"name": shared.name, "account": shared.account, "slots": len(shared.slots), "tasks": tasks}
            for shared, tasks in users.items()
        ]
        sys.stdout.write(json.dumps({"shared": told}, indent=2, ensure_ascii=False) + "\n")
        return 0
    for line in sorted(_lines(users)):
        sys.stdout.write(f"{line}\n")
    concerned = {name for tasks in users.values() for name in tasks}
    sys.stderr.write(f"{len(concerned)} of {len(names)} tasks share something, the others nothing\n")
    return 0


def _lines(users: dict[SharedResource, list[str]]) -> Iterable[str]:
    """Accounts of one kind that have a task each are one line: each of these runs alone, but for itself."""
    alone: dict[str, list[str]] = {}
    for shared, tasks in users.items():
        if len(tasks) == 1 and shared.account is not None:
            alone.setdefault(shared.name, []).extend(tasks)
        else:
            yield f"{shared.name}: {len(shared.slots)} at once of {', '.join(tasks)}"
    for name, tasks in alone.items():
        yield f"{name}: each has its own, and runs once at a time: {', '.join(sorted(tasks))}"
