"""All tasks of all suites, under ids that no two of them share."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from decathlon_mcp.catalogue.pass_rates import PassRate, PassRates
from decathlon_mcp.errors import SuiteError, UnknownTaskError
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

NEAR = 5


class Catalogue:
    """An id that more than one suite has is spelled `suite:task`; every id may be spelled so.

    `pass_rates`: what is known of the tasks' difficulty, if anything is. Raises SuiteError where two suites
    have one name.
    """

    def __init__(self, suites: Sequence[Suite], pass_rates: PassRates | None = None) -> None:
        self.suites = tuple(suites)
        self.pass_rates = pass_rates
        if pass_rates is not None:
            pass_rates.warn_of_strangers([suite.name for suite in suites])
        for name, count in Counter(suite.name for suite in suites).items():
            if count > 1:
                paths = " and ".join(str(suite.path) for suite in suites if suite.name == name)
                raise SuiteError(f"{paths} are both called {name!r}: give one a `name` in its suite.yaml")
        shared = Counter(task_id for suite in suites for task_id in suite.tasks)
        self._entries: dict[str, tuple[Suite, Task]] = {}
        self._spelled: dict[str, str] = {}
        for suite in suites:
            for task_id, task in suite.tasks.items():
                full = f"{suite.name}:{task_id}"
                spelled = full if shared[task_id] > 1 else task_id
                self._entries[spelled] = (suite, task)
                self._spelled[full] = spelled

    def find(self, task_id: str) -> tuple[Suite, Task]:
        """Raises UnknownTaskError with `near`, ids that look like it; SuiteError for a broken task."""
        entry = self._found(task_id)
        if entry is None:
            near = self._near(task_id)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownTaskError(f"there is no task {task_id!r}{hint}", near=near)
        suite, task = entry
        return suite, suite.task(task.id)

    def entry(self, name: str) -> tuple[Suite, Task]:
        """A task that may be broken. Raises KeyError where there is none."""
        if (entry := self._found(name)) is None:
            raise KeyError(name)
        return entry

    def pass_rate(self, task: Task) -> PassRate | None:
        """How often it was passed; None where nothing is known of it."""
        return None if self.pass_rates is None else self.pass_rates.of(task.suite, task.id)

    def ids(self) -> list[str]:
        """Every id as it is spelled, suite by suite, sorted within each."""
        return list(self._entries)

    def __iter__(self) -> Iterator[tuple[str, Suite, Task]]:
        """Broken tasks are among them, with what is broken in `errors`."""
        for spelled, (suite, task) in self._entries.items():
            yield spelled, suite, task

    def __len__(self) -> int:
        return len(self._entries)

    def _found(self, task_id: str) -> tuple[Suite, Task] | None:
        return self._entries.get(self._spelled.get(task_id, task_id))

    def _near(self, task_id: str) -> list[str]:
        wanted = task_id.lower()
        ids = {spelled.lower(): spelled for spelled in self._entries}
        same = [spelled for spelled in self._entries if spelled.endswith(f":{task_id}")]
        close = [ids[name] for name in difflib.get_close_matches(wanted, ids, n=NEAR, cutoff=0.6)]
        holding = [spelled for lower, spelled in ids.items() if len(wanted) > 2 and wanted in lower]
        return list(dict.fromkeys([*same, *close, *holding]))[:NEAR]
