"""The list of tasks as clients see it: `list_tasks`, and `tasks` on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject


def list_tasks(
    catalogue: Catalogue,
    names: Iterable[str],
    *,
    prompts: bool = False,
    metrics: Mapping[str, Sequence[str] | None] | None = None,
) -> list[JsonObject]:
    """Describe these tasks: what each needs, and whether it can run here. The order of `names` is kept.

    A name may occur more than once. `metrics` are those of each task besides the server's, None if they are
    unknown; a task that has none is described without. A prompt is that of an episode with the `launch_time`
    next to it; with `prompt_is_provisional`, the episode's has other paths.
    """
    names = [*names]
    # In whole seconds, since clients pass it on as text.
    launch_time = datetime.now().astimezone().replace(microsecond=0) if prompts else None
    entries = {
        name: _entry(catalogue, name, *catalogue.entry(name), launch_time) for name in dict.fromkeys(names)
    }
    for name, own in (metrics or {}).items():
        if name in entries and own != []:
            entries[name]["metrics"] = own
    return [entries[name] for name in names]


def _entry(
    catalogue: Catalogue, name: str, suite: Suite, task: Task, launch_time: datetime | None
) -> JsonObject:
    """`launch_time`: of the prompt; None: without a prompt."""
    missing = catalogue.missing_sentences(suite, task)
    entry: JsonObject = {
        "id": name,
        "suite": suite.name,
        "splits": list(task.splits),
        "servers": list(task.needs.servers),
        "local_tools": list(task.needs.local_tools),
        "network": task.needs.network,
        "runnable": not missing,
        "missing": missing,
    }
    if shared := suite.shared_resources(task.id):
        entry["shared"] = [resource.name for resource in shared]
    if (rate := catalogue.pass_rate(task)) is not None:
        entry |= {"pass_rate": rate.share, "attempts": rate.attempts}
    if launch_time is not None:
        entry |= {
            "prompt": _prompt(catalogue, suite, task, launch_time),
            "prompt_is_provisional": catalogue.prompt_is_provisional(suite),
            "launch_time": launch_time.isoformat(),
        }
    return entry


def _prompt(catalogue: Catalogue, suite: Suite, task: Task, launch_time: datetime) -> str | None:
    """None if its files cannot be read; `missing` says why."""
    try:
        return catalogue.prompt(suite, task, launch_time).instructions
    except SuiteError:
        return None
