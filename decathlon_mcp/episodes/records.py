"""Records of an episode in the store, and the episode that is made from them again.

`EpisodeRecords` writes the row of one episode, `SandboxRecords` the rows of its sandboxes. Without a store,
both write nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from decathlon_sandbox import wire
from pydantic import TypeAdapter

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.extensions import SandboxRole
from decathlon_mcp.episodes.specification import Claim, EpisodeLimits, EpisodeSpec, Instant, Principal
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import DecathlonError, SuiteError, UnknownTaskError
from decathlon_mcp.grading.attempt import Facts
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Provider, SandboxSpec, kernel_of
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, Store
from decathlon_mcp.suites.tasks import FOLDER, Task
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

log = logging.getLogger("decathlon.episodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What changes in the course of an episode, except for its phase."""

    opened_at: float | None = None
    """When the absolute time limit started, in Unix seconds."""
    opened: Instant | None = None
    """The same by a clock that is never set."""
    ready_at: datetime | None = None
    """When the tools were ready, by the machine's clock."""
    ready: Instant | None = None
    """When the tools were ready, by a clock that is never set."""
    slots: Mapping[str, str] = field(default_factory=dict[str, str])
    """The slots of shared resources that the episode uses."""
    agent: str | None = None
    """Name of the agent's sandbox."""
    sealed: bool = False
    """Whether the scratch folder has the archive of the task's folder as preprocess left it."""
    captured: bool = False
    """Whether the scratch folder has the archive of the agent's workspace."""
    facts: Facts = field(default_factory=Facts)
    """Facts for the verdict."""
    claim: Claim | None = None
    """How the attempt was closed; None before."""
    requested_ending: Ending | None = None
    """The ending that was requested; None before."""
    closing_reason: str = ""
    """The client's reason for closing the episode."""

    def to_json(self) -> JsonObject:
        values = {**_PROGRESS.dump_python(self, mode="json"), "facts": self.facts.noted()}
        return {name: value for name, value in values.items() if value}


_SPEC_MEMBERS = frozenset({"owner", "launch_time", "policy", "limits", "ends_with_response"}) | {
    *("shares_launch_time", "calls_before", "plugins")
}
"""What a row's `spec` has beside the members of `EpisodeSpec.reported`."""
_PROGRESS = TypeAdapter(Progress)
_PRINCIPAL = TypeAdapter(Principal)
_LIMITS = TypeAdapter(EpisodeLimits)
_SANDBOX = TypeAdapter(SandboxSpec)


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode of a dead server, as its rows in the store describe it."""

    spec: EpisodeSpec
    suite: str
    """Name of the suite."""
    phase: Phase
    """The episode's last stored phase."""
    started_at: float
    """When the episode started, in Unix seconds."""
    progress: Progress
    tools: JsonObject | None
    """The stored tools of the episode; None if there are none."""
    verdict: Verdict | None
    """None before grading is over."""
    ending: Ending | None
    """None for an episode that has not ended."""
    calls: int
    """How many calls were sent; 0 before the attempt is closed."""
    sandboxes: tuple[SandboxRow, ...] = ()
    """The rows of the episode's sandboxes."""
    obstacle: str | None = None
    """Why this server cannot continue the episode: its task or its sandbox is not here."""

    @property
    def is_closed(self) -> bool:
        """Whether its end was requested and needs no grading first."""
        return self.progress.requested_ending is not None and self.phase is not Phase.CLAIMED

    @property
    def needed_sandboxes(self) -> list[SandboxRow]:
        """The sandboxes without which the episode cannot continue."""
        if self.verdict is not None or self.is_closed or self.phase not in (Phase.READY, Phase.CLAIMED):
            return []
        return [
            row
            for row in self.sandboxes
            if row.role == "service" or (row.name == self.progress.agent and not self.progress.captured)
        ]


def read_episode(row: EpisodeRow, sandboxes: tuple[SandboxRow, ...], catalogue: Catalogue) -> StoredEpisode:
    """Read the rows of an episode. Raises ValueError for a row that is not valid.

    A task that is not served any more, or is broken now, is only a name: `Task.errors` says so.
    """
    obstacle = None
    try:
        suite, task = catalogue.find(row.task)
        suite_name = suite.name
    except (UnknownTaskError, SuiteError) as error:
        obstacle, suite_name = error.message, row.suite
        task = _task_without_files(row, obstacle)
    spec, verdict = row.spec, row.verdict
    try:
        return StoredEpisode(
            spec=EpisodeSpec(
                id=row.id,
                agent_id=row.agent_id,
                task=task,
                task_name=row.task,
                owner=_PRINCIPAL.validate_python(spec["owner"]),
                launch_time=datetime.fromisoformat(spec["launch_time"]),
                policy=spec["policy"],
                limits=_LIMITS.validate_python(spec["limits"]),
                operation=row.operation,
                ends_with_response=bool(spec["ends_with_response"]),
                labels=row.labels,
                shares_launch_time=bool(spec.get("shares_launch_time")),
                calls_before=int(spec.get("calls_before", 0)),
                plugins=spec.get("plugins", {}),
                reported={name: value for name, value in spec.items() if name not in _SPEC_MEMBERS},
            ),
            suite=suite_name,
            phase=Phase(row.phase),
            started_at=row.started_at,
            progress=_PROGRESS.validate_python(row.progress),
            tools=row.tools,
            verdict=None if verdict is None else Verdict.model_validate(verdict),
            ending=None if row.ending is None else Ending(row.ending),
            calls=row.calls or 0,
            sandboxes=sandboxes,
            obstacle=obstacle,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the row has no valid {error}") from None


def _task_without_files(row: EpisodeRow, why: str) -> Task:
    """What is left of a task: clients must still learn how its episodes ended."""
    return Task(id=row.task, suite=row.suite, folder=PurePosixPath(FOLDER, "-"), errors=(SuiteError(why),))


def sandbox_spec(row: SandboxRow) -> SandboxSpec:
    """The specification with which a sandbox was opened. Raises ValueError."""
    return _SANDBOX.validate_python({name: row.spec[name] for name in row.spec if name != "kernel"})


class EpisodeRecords:
    """Writes the row of one episode. `progress` is what the store has of it.

    Changes before the episode is ready reach the row when it is ready: until then, the set-up starts over if
    the server dies. `archive`: a store for episodes that end with this process. It gets their rows when they
    have ended, so that no later server finds one to continue.
    """

    def __init__(self, store: Store | None, episode_id: str, *, archive: Store | None = None) -> None:
        self._store = store
        self._archive = archive
        self._row: EpisodeRow | None = None
        self._id = episode_id
        self.progress = Progress()

    def insert(self, spec: EpisodeSpec, suite: str, started_at: float) -> None:
        """Write a new episode. Raises AtCapacityError if the disk is full."""
        optional = {
            "shares_launch_time": spec.shares_launch_time,
            "calls_before": spec.calls_before,
            "plugins": dict(spec.plugins),
        }
        self._row = EpisodeRow(
            id=spec.id,
            agent_id=spec.agent_id,
            server="",
            suite=suite,
            task=spec.task_name,
            token=spec.owner.token,
            operation=spec.operation,
            phase=Phase.QUEUED,
            started_at=started_at,
            spec={
                "owner": asdict(spec.owner),
                "launch_time": spec.launch_time.isoformat(),
                "policy": spec.policy,
                "limits": asdict(spec.limits),
                "ends_with_response": spec.ends_with_response,
                **{name: value for name, value in optional.items() if value},
                **spec.reported,
            },
            progress={},
            labels=spec.labels,
        )
        if self._store is not None:
            self._store.insert_episode(self._row)
            self._row = None

    def update(
        self, phase: Phase, *, tools: JsonObject | None = None, calls: int | None = None, **changes: Any
    ) -> None:
        """Write the phase and what has changed of the progress, before the episode acts upon it.

        `calls`: how many were sent; written once the attempt is closed, and not for each call.
        """
        self.progress = replace(self.progress, **changes)
        if self._store is not None:
            given = {name: value for name, value in (("tools", tools), ("calls", calls)) if value is not None}
            self._store.update_episode(self._id, phase=phase, progress=self.progress.to_json(), **given)

    def note_facts(self, **facts: Any) -> None:
        """Note what the verdict is to report, for members of `Facts` and of plug-ins.

        It is written with the next `update`. Raises ValueError for a member that is not valid.
        """
        self.progress = replace(self.progress, facts=self.progress.facts.with_(**facts))

    def unwritten(self, phase: Phase) -> EpisodeRow | None:
        """The row of an episode in this phase that no store has yet, because it ends with this process."""
        return None if self._row is None else replace(self._row, phase=phase)

    def write(self, **values: Any) -> None:
        """Write the labels or the verdict."""
        if self._store is not None:
            self._store.update_episode(self._id, **values)
        elif self._row is not None:
            self._row = replace(self._row, **values)

    def end(self, ending: Ending, *, cause: str | None, calls: int) -> None:
        if self._store is not None:
            self._store.end_episode(self._id, ending, cause=cause, calls=calls)
        elif self._archive is not None and self._row is not None:
            # The ids of requests are known to the server that ran it alone.
            row = replace(self._row, progress=self.progress.to_json(), operation=None)
            try:
                self._archive.insert_episode(row)
                self._archive.end_episode(self._id, ending, cause=cause, calls=calls)
            except DecathlonError as error:
                log.warning("the row of an episode is lost", extra=fields(why=error.message))
        self._row = None


class SandboxRecords:
    """Writes the rows of one episode's sandboxes, for the factory that opens them.

    `former`: the sandboxes that the episode had when its server died, by name.
    """

    def __init__(self, store: Store | None, episode_id: str) -> None:
        self._store = store
        self._id = episode_id
        self.former: Mapping[str, SandboxRow] = {}

    def insert(self, spec: SandboxSpec, provider: Provider, role: SandboxRole) -> None:
        """Write the row of a sandbox before it opens; it stays until `forget`."""
        if self._store is not None:
            row = SandboxRow(
                name=spec.name,
                owner=self._store.server,
                episode=self._id,
                role=role,
                provider=provider.name,
                isolation=provider.isolation,
                wire_version=wire.VERSION,
                # The whole of it, 2 KB: a state that is saved after a restart names its sandbox.
                spec=_SANDBOX.dump_python(spec, mode="json") | {"kernel": kernel_of(provider)},
            )
            self._store.save(row)

    def forget(self, name: str) -> None:
        """The sandbox is gone."""
        if self._store is not None:
            self._store.delete(SandboxRow, name)
