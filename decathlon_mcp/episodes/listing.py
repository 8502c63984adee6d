"""What tasks there are, and drawing one of them."""

from __future__ import annotations

import random
from datetime import datetime

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.model import JsonObject
from decathlon_mcp.suites import Catalogue, Suite, Task


def list_tasks(
    catalogue: Catalogue, *, split: str | None = None, search: str | None = None, prompts: bool = False
) -> list[JsonObject]:
    """What each task needs and whether it can run here, in the catalogue's order.

    Prompts are as an episode under Docker has them, with the time it is now; no sandbox is opened for them.
    """
    return [
        _described(name, suite, task, prompts=prompts)
        for name, suite, task in catalogue
        if (split is None or split in task.splits) and (search is None or search in name)
    ]


def draw(catalogue: Catalogue, *, split: str | None = None, seed: int | None = None) -> str:
    """The id of a task that can run here, at random; the same for the same seed.

    Raises BadRequestError when there is none to draw from.
    """
    names = [
        name
        for name, suite, task in catalogue
        if (split is None or split in task.splits) and not suite.missing(task)
    ]
    if not names:
        known = sorted({known for _, _, task in catalogue for known in task.splits})
        where = f"of the split {split!r} " if split else ""
        raise BadRequestError(f"no task {where}can run here; the splits are {', '.join(known) or '(none)'}")
    return random.Random(seed).choice(names)


def _described(name: str, suite: Suite, task: Task, *, prompts: bool) -> JsonObject:
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
    if prompts:
        now = datetime.now().astimezone()
        prompt = suite.prompt(task, root=suite.dialect.root, launch_time=now, names=suite.dialect.names)
        told["prompt"] = prompt.instructions
    return told
