"""How a task can run: as it is, with a recorded web, with services of its own, or not at all.

It follows from what the task needs (`Needs`) and what it lacks (`missing_requirements`), so that it can be
known before a recording exists or an image has been built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from decathlon_mcp.catalogue.requirements import MissingRequirement
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.types import JsonObject

WayName: TypeAlias = Literal["ready", "with a recording", "with a private service", "cannot run", "broken"]

READY: Final = "ready"
CANNOT_RUN: Final = "cannot run"
BROKEN: Final = "broken"
PRIVATE_SERVICES: Mapping[str, str] = {
    "canvas": "a private Canvas",
    "poste": "private mail",
    "postgres": "a private database",
    "woocommerce": "private shops",
}
"""Services that an episode can have to itself, with their names for people."""
SOLVED_BY_A_RECORDING = frozenset({"network", "recording"})
"""Kinds of requirements that a task with a recorded web does not have."""
KINDS: Mapping[str, str] = {
    "credential": "",
    "service": "the service ",
    "server": "the MCP server ",
    "package": "the program of the MCP server ",
    "local tool": "the local tool ",
    "text": "",
}
"""What is written before the name of a missing requirement, by its kind."""


@dataclass(frozen=True, slots=True)
class WayToRun:
    """How a task can run.

    `recording`: it needs the internet, or a recording of it. `to_record`: credentials that it lacks and that
    only recording takes. `services`: those that its episodes can have to themselves and that are not hosted,
    as texts for people. `missing`: whatever else it lacks, as texts for people; with any, it cannot run, and
    its text has `to_record` among them. `broken`: files of the checkout with errors; with any, it cannot run
    either.
    """

    recording: bool = False
    to_record: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def name(self) -> WayName:
        """The way in one word; a task that takes a recording and a private service is `with a recording`."""
        if self.broken:
            return BROKEN
        if self.missing:
            return CANNOT_RUN
        if self.recording:
            return "with a recording"
        return "with a private service" if self.services else READY

    @property
    def text(self) -> str:
        """`ready`, `with …`, `cannot run: …` with what it lacks, or `broken: …`."""
        if self.broken:
            lacks = f"; {CANNOT_RUN}: {', '.join(self.missing)}" if self.missing else ""
            return f"{BROKEN}: {', '.join(self.broken)}{lacks}"
        if self.missing:
            # Without a network, such a task takes these as well.
            return f"{CANNOT_RUN}: {', '.join((*self.missing, *self.to_record))}"
        key = f" ({', '.join(self.to_record)} to record it)" if self.to_record else ""
        parts = [f"a recording{key}"] if self.recording else []
        parts += self.services
        return f"with {' and '.join(parts)}" if parts else READY

    def to_json(self) -> JsonObject:
        """The entry in the output of `tasks --check --json`."""
        return {
            "way": self.name,
            "recording": self.recording,
            "to_record": list(self.to_record),
            "services": list(self.services),
            "missing": list(self.missing),
            "broken": list(self.broken),
        }


def way_to_run(suite: Suite, task: Task, missing: Sequence[MissingRequirement]) -> WayToRun:
    """How a task can run that lacks these requirements."""
    recording = task.needs.network or task.grader_network
    recordable = {name.partition(".")[2] for name in suite.resources.settings.needed_to_record}
    # A file that is copied into the sandbox is named by its place in the checkout, once.
    sources = {
        target: str(file.relative_to(suite.path))
        for target, file in suite.resources.credential_files(task).items()
        if file.is_relative_to(suite.path)
    }
    to_record: list[str] = []
    others: list[str] = []
    broken: list[str] = []
    for requirement in missing:
        if requirement.kind == "service" and requirement.name in PRIVATE_SERVICES:
            continue
        if recording and requirement.kind in SOLVED_BY_A_RECORDING:
            continue
        if requirement.kind == "broken":
            file = Path(requirement.name)
            broken.append(str(file.relative_to(suite.path) if file.is_relative_to(suite.path) else file))
        elif recording and requirement.kind == "credential" and requirement.name in recordable:
            to_record.append(requirement.name)
        else:
            name = sources.get(requirement.name, requirement.name)
            others.append(f"{KINDS.get(requirement.kind, '')}{name}")
    services = [
        PRIVATE_SERVICES[name]
        for name, service in suite.services(task).items()
        # A service with an image runs in a sandbox of the episode, whether it is declared or not.
        if name in PRIVATE_SERVICES and (service.image is not None or not service.available)
    ]
    unique = tuple(dict.fromkeys(others)), tuple(dict.fromkeys(broken))
    return WayToRun(recording, tuple(to_record), tuple(services), *unique)


def count_ways(ways: Iterable[WayToRun]) -> dict[str, int]:
    """The number of tasks for each way; those with a missing requirement last, together."""
    counts: dict[str, int] = {}
    for way in ways:
        text = _without_key(way).text
        if way.missing or way.broken:
            text = BROKEN if way.broken else CANNOT_RUN
        counts[text] = counts.get(text, 0) + 1
    order: dict[str, int] = {READY: 0, CANNOT_RUN: 2, BROKEN: 3}
    return dict(sorted(counts.items(), key=lambda item: (order.get(item[0], 1), -item[1], item[0])))


def _without_key(way: WayToRun) -> WayToRun:
    return WayToRun(way.recording, (), way.services)
