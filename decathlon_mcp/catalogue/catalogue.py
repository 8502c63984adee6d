"""All tasks of all suites, under unique ids, and their list as clients see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from typing import Self

from decathlon_mcp.catalogue.pass_rates import LiveRates, PassRates
from decathlon_mcp.catalogue.requirements import (
    HostInfo,
    MissingProgram,
    MissingRequirement,
    missing_requirements,
)
from decathlon_mcp.errors import BadRequestError, SuiteError, UnknownTaskError
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import MAX_NAME_CHARACTERS, quoted, similar

MAX_SUGGESTIONS = 5


@dataclass(frozen=True, slots=True)
class SuiteRevision:
    """The files of a suite that a task is played with.

    `changed`: the files that all sandboxes of the suite share have changed since the server's start.
    """

    revision: str
    release: str | None
    changed: bool

    @classmethod
    def read(cls, suite: Suite, task: Task, common_digest: str) -> Self:
        """Read it, as the files are now. Blocks: in a checkout of git it runs git."""
        release = None if suite.release is None else suite.release.name
        return cls(suite.revision_of(task), release, suite.common_digest() != common_digest)


class Catalogue:
    """The tasks of several suites, and whether they can run on this host.

    A task's catalogue id is its own id, or `suite:task` if several suites have that id; `suite:task` always
    finds it. `pass_rates`: None if nothing is known of the tasks' difficulty. Raises SuiteError if two suites
    have the same name.
    """

    def __init__(
        self, suites: Sequence[Suite], pass_rates: PassRates | None = None, *, host: HostInfo | None = None
    ) -> None:
        self.suites = tuple(suites)
        self.pass_rates = pass_rates
        self.live_rates: LiveRates | None = None
        """What a running server knows of its own episodes."""
        self._host = host or HostInfo()
        if pass_rates is not None:
            pass_rates.warn_of_unknown_suites([suite.name for suite in suites])
        for name, count in Counter(suite.name for suite in suites).items():
            if count > 1:
                paths = " and ".join(str(suite.path) for suite in suites if suite.name == name)
                raise SuiteError(f"{paths} are both called {name!r}: give one a `name` in its suite.yaml")
        uses = Counter(task_id for suite in suites for task_id in suite.tasks)
        self._entries: dict[str, tuple[Suite, Task]] = {}
        self._ids: dict[str, str] = {}
        for suite in suites:
            for task_id, task in suite.tasks.items():
                full_id = f"{suite.name}:{task_id}"
                catalogue_id = full_id if uses[task_id] > 1 else task_id
                self._entries[catalogue_id] = (suite, task)
                self._ids[full_id] = catalogue_id

    def find(self, task_id: str) -> tuple[Suite, Task]:
        """Find a task. Raises UnknownTaskError (with similar ids), and SuiteError if the task has errors."""
        entry = self._get(task_id)
        if entry is None:
            near = self._similar_ids(task_id)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownTaskError(f"there is no task {quoted(task_id)}{hint}", near=near)
        suite, task = entry
        return suite, suite.task(task.id)

    def entry(self, task_id: str) -> tuple[Suite, Task]:
        """Find a task that may have errors. Raises KeyError if there is no such task."""
        if (entry := self._get(task_id)) is None:
            raise KeyError(task_id)
        return entry

    def missing_requirements(self, suite: Suite, task: Task) -> list[MissingRequirement]:
        """What a task lacks on this host; empty if it can run."""
        return missing_requirements(suite, task, self._host)

    def missing_sentences(self, suite: Suite, task: Task) -> list[str]:
        """One sentence for each missing requirement."""
        return [requirement.sentence for requirement in self.missing_requirements(suite, task)]

    def is_runnable(self, suite: Suite, task: Task) -> bool:
        """Whether a task lacks nothing on this host."""
        return not self.missing_requirements(suite, task)

    def launch_time(self, suite: Suite, task: Task, requested: datetime | None = None) -> datetime:
        """The time that a task is played at: of its recorded web, else as requested, else now.

        It is in the time zone of the sandboxes.

        Raises BadRequestError if the requested time is not the recording's.
        """
        read, recorded = self._host.recorded_launch_time, None
        if read is not None and (task.needs.network or task.grader_network):
            recorded = read(suite, task)
        if recorded is None:
            return self._in_zone_of_sandboxes(suite, requested)
        if requested is not None and requested != recorded:
            raise BadRequestError(
                f"the recording of the web of {task.id} fixes the launch time "
                f"{recorded.isoformat()}: leave out another one"
            )
        return recorded

    def _in_zone_of_sandboxes(self, suite: Suite, when: datetime | None) -> datetime:
        """The moment as the clock of a sandbox shows it, which the task's programs read. None: now.

        A time without an offset is one of that clock. Raises BadRequestError for a time that no clock shows.
        """
        zone = self._host.zones.get(suite.name)  # None: this machine's
        if when is None:
            when = datetime.now().astimezone(zone)
        elif when.tzinfo is None:
            when = when.replace(tzinfo=zone)
        try:
            return when.astimezone(zone)
        except (OverflowError, ValueError, OSError):
            raise BadRequestError(f"there is no such launch time: {when.isoformat()}") from None

    def record_zone(self, suite: Suite, zone: tzinfo) -> None:
        """Keep the time zone that the suite's sandboxes have."""
        self._host = replace(self._host, zones={**self._host.zones, suite.name: zone})

    def prompt(self, suite: Suite, task: Task, launch_time: datetime) -> Prompt:
        """The prompt of an episode that starts at that time. Raises SuiteError if its files cannot be read.

        Where `prompt_is_provisional`, an episode has other paths in it.
        """
        names = self._host.tool_names or suite.profile.names
        return suite.prompt(task, root=suite.profile.root, launch_time=launch_time, names=names)

    def prompt_is_provisional(self, suite: Suite) -> bool:
        """Whether the prompts of this suite's tasks are only known when an episode has started."""
        return suite.name in self._host.varying_root

    def record_missing_programs(self, suite: Suite, programs: Mapping[str, MissingProgram]) -> None:
        """Keep the result of probing the suite's sandboxes: missing programs by MCP server."""
        # The one thing that is only known after the catalogue is in use: the probe takes seconds.
        self._host = replace(
            self._host, missing_programs={**self._host.missing_programs, suite.name: programs}
        )

    def __iter__(self) -> Iterator[tuple[str, Suite, Task]]:
        """Every task with its catalogue id, suite by suite, sorted within each; also tasks with errors."""
        for catalogue_id, (suite, task) in self._entries.items():
            yield catalogue_id, suite, task

    def __len__(self) -> int:
        return len(self._entries)

    def _get(self, task_id: str) -> tuple[Suite, Task] | None:
        return self._entries.get(self._ids.get(task_id, task_id))

    def _similar_ids(self, task_id: str) -> list[str]:
        if len(task_id) >= MAX_NAME_CHARACTERS:
            return []
        lower_id = task_id.lower()
        by_lower = {catalogue_id.lower(): catalogue_id for catalogue_id in self._entries}
        same = [catalogue_id for catalogue_id in self._entries if catalogue_id.endswith(f":{task_id}")]
        close_matches = similar(lower_id, by_lower, count=MAX_SUGGESTIONS)
        close = [by_lower[match] for match in close_matches]
        containing = [name for lower, name in by_lower.items() if len(lower_id) > 2 and lower_id in lower]
        return list(dict.fromkeys([*same, *close, *containing]))[:MAX_SUGGESTIONS]


def list_tasks(
    catalogue: Catalogue,
    names: Iterable[str],
    *,
    prompts: bool = False,
    metrics: Mapping[str, Sequence[str] | None] | None = None,
    rates: PassRates | None = None,
) -> list[JsonObject]:
    """Describe these tasks: what each needs, and whether it can run here. The order of `names` is kept.

    A name may occur more than once. `metrics`: metrics of each task besides the server's, None if they are
    unknown; a task that has none is described without. A prompt is written for the `launch_time` next to it;
    with `prompt_is_provisional`, the episode's prompt has other paths. `rates`: the pass rates that are
    listed, by default the file of results.
    """
    names = [*names]
    # In whole seconds, since clients pass it on as text.
    launch_time = datetime.now().astimezone().replace(microsecond=0) if prompts else None
    rates = catalogue.pass_rates if rates is None else rates
    entries = {
        name: _entry(catalogue, name, *catalogue.entry(name), launch_time, rates)
        for name in dict.fromkeys(names)
    }
    for name, own in (metrics or {}).items():
        if name in entries and own != []:
            entries[name]["metrics"] = own
    return [entries[name] for name in names]


def _entry(
    catalogue: Catalogue,
    name: str,
    suite: Suite,
    task: Task,
    launch_time: datetime | None,
    rates: PassRates | None,
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
    if rates is not None and (rate := rates.of(suite.name, task.id)) is not None:
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
