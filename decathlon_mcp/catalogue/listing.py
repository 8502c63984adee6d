"""What tasks there are, as clients are told."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject


def list_tasks(catalogue: Catalogue, names: Iterable[str], *, prompts: bool = False) -> list[JsonObject]:
    """What each of these tasks needs and whether it can run here, in the order they are named in; a name may
    be there more than once.

    Prompts are as an episode under Docker has them, with the time it is now; no sandbox is opened for them.
    """
    asked = [*names]
    told = {
        name: _described(catalogue, name, *catalogue.entry(name), prompts=prompts)
        for name in dict.fromkeys(asked)
    }
    return [told[name] for name in asked]


def _described(catalogue: Catalogue, name: str, suite: Suite, task: Task, *, prompts: bool) -> JsonObject:
    missing = suite.missing(task)
    told: JsonObject = {
        "id": name,
        "suite": suite.name,
        "splits": list(task.splits),
        "servers": list(task.needs.servers),
        "local_tools": list(task.needs.local_tools),
        "network": task.needs.network,
        "runnable": not missing,
        "missing": missing,
    }
    if shared := suite.shared(task.id):
        told["shared"] = [each.name for each in shared]
    if (rate := catalogue.pass_rate(task)) is not None:
        told |= {"pass_rate": rate.share, "attempts": rate.attempts}
    if prompts:
        told["prompt"] = _prompt(suite, task)
    return told


def _prompt(suite: Suite, task: Task) -> str | None:
    """None where its files cannot be read: `missing` says so."""
    now = datetime.now().astimezone()
    try:
        prompt = suite.prompt(task, root=suite.profile.root, launch_time=now, names=suite.profile.names)
    except SuiteError:
        return None
    return prompt.instructions
