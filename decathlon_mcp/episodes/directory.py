"""The episodes of one server: how they are made, and found by the names that clients know."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.episodes.beginnings import EpisodeHooks
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.records import read_episode
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import EpisodeLimits, EpisodeSpec, Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.events import Events
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.disk import RETRY_SECONDS, DiskSpace, is_full
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.storage.store import ENDED, EpisodeRow, Store
from decathlon_mcp.storage.trajectory import Trajectory

MAX_ENDED_EPISODES = 2_000
"""Ended episodes whose state and verdict can still be requested; the oldest are dropped."""
MAX_ENDED_IN_MEMORY = 200
"""The same on a server with a store, from which dropped episodes are read. One takes 20 KB of memory."""

MAX_LOG_BYTES = 256 << 20
"""Limit on the calls in one episode's trajectory; evaluators get about the same again as `traj_log.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """What applies to every episode of a server."""

    reward_policy: RewardPolicy
    """The policy of an episode that is started without one."""
    limits: EpisodeLimits
    """The defaults of the limits of an episode."""
    drain_seconds: float
    """How long a stopping server waits for gradings."""
    journals: Path
    """Folder in which each episode gets a folder named by its handle."""
    scratch: Path
    """Folder for the archives of running episodes."""
    disk: DiskSpace
    """The file system of `journals` and `scratch`."""
    hooks: Sequence[EpisodeHooks] = ()
    """The hooks that plug-ins add to every episode."""


class EpisodeDirectory:
    """The episodes in memory, and the ended ones of the store.

    `factories`: sandbox factories by the names of the catalogue's suites. `store`: keeps what the next server
    needs to continue; None if all episodes end with this process. `archive`: without a store, gets the rows
    of ended episodes.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        factories: Mapping[str, SandboxFactory],
        options: RegistryOptions,
        *,
        admission: Admission,
        events: Events,
        store: Store | None,
        archive: Store | None,
    ) -> None:
        self.factories = factories
        self._catalogue = catalogue
        self._options = options
        self._admission = admission
        self._events = events
        self.store = store
        self._archive = archive
        self._episodes: dict[str, Episode] = {}
        self._by_agent_id: dict[str, Episode] = {}
        self._by_operation: dict[str, Episode] = {}

    # finding

    @property
    def live(self) -> list[Episode]:
        """The episodes that have not ended."""
        return [episode for episode in self._episodes.values() if episode.state.phase is not Phase.ENDED]

    def owned_by(self, principal: Principal) -> list[Episode]:
        """The principal's own episodes, newest first."""
        return [
            episode for episode in reversed(self._episodes.values()) if principal.owns(episode.spec.owner)
        ]

    def find(self, handle: str) -> Episode | None:
        """The episode with this handle."""
        return self._episodes.get(handle) or self._ended_before(handle)

    def of_agent(self, agent_id: str) -> Episode | None:
        """The episode with this agent id."""
        episode = self._by_agent_id.get(agent_id)
        # Most requests have the handle of a live episode, for which the store need not be asked.
        if episode is None and agent_id not in self._episodes and self.store is not None:
            row = self.store.find_one(EpisodeRow, agent_id=agent_id)
            episode = None if row is None else self._ended_before(row.id)
        return episode

    def of_operation(self, operation: str | None) -> Episode | None:
        """The episode that a request with this id has started."""
        if operation is None:
            return None
        episode = self._by_operation.get(operation)
        if episode is None and self.store is not None:
            row = self.store.find_one(EpisodeRow, operation=operation)
            episode = None if row is None else self._ended_before(row.id)
        return episode

    def handle_of(self, public_id: str) -> str | None:
        """The handle of an episode of this state folder."""
        for episode in self._episodes.values():
            if episode.public_id == public_id:
                return episode.id
        rows = [] if self.store is None else self.store.find_episodes(public_id, 1)
        return rows[0].id if rows else None

    def folder(self, handle: str) -> Path:
        """The folder with the files of the episode with this handle."""
        return self._options.journals / handle

    def factory(self, suite: str) -> SandboxFactory:
        """The factory for the sandboxes of that suite; one without tasks for a suite that is gone."""
        factory = self.factories.get(suite)
        if factory is None:
            # An episode of it that ended, or that a dead server had, is still asked for.
            other = next(iter(self.factories.values()))
            factory = replace(other, suite=replace(other.suite, name=suite, tasks={}), tool_lists=None)
        return factory

    # making

    def make(self, spec: EpisodeSpec, suite: str, ticket: Ticket, trajectory: Trajectory) -> Episode:
        """An episode, which `add` keeps."""
        return Episode(
            spec,
            sandbox_factory=self.factory(suite),
            ticket=ticket,
            trajectory=trajectory,
            emit=self._events.episode(suite, spec.task_name, spec.public_id),
            store=self.store,
            archive=self._archive,
        )

    def add(self, episode: Episode) -> None:
        """Keep an episode, and drop the oldest ended ones over their limit."""
        ended = [other for other in self._episodes.values() if other.state.phase is Phase.ENDED]
        limit = MAX_ENDED_EPISODES if self.store is None else MAX_ENDED_IN_MEMORY
        while len(ended) > limit:
            # The token with the most ended episodes loses one, so that no token can displace the episodes of
            # another.
            ((token, _),) = Counter(other.spec.owner.token for other in ended).most_common(1)
            oldest = next(other for other in ended if other.spec.owner.token == token)
            ended.remove(oldest)
            del self._episodes[oldest.id], self._by_agent_id[oldest.spec.agent_id]
            self._by_operation.pop(oldest.spec.operation or "", None)
        self._episodes[episode.id] = self._by_agent_id[episode.spec.agent_id] = episode
        if episode.spec.operation is not None:
            self._by_operation[episode.spec.operation] = episode

    def _ended_before(self, handle: str) -> Episode | None:
        """An episode that ended on this state folder and is not in memory, as far as the store has it."""
        row = None if self.store is None else self.store.find_one(EpisodeRow, id=handle)
        if row is None or row.phase != ENDED:
            return None
        try:
            stored = read_episode(row, (), self._catalogue)
        except ValueError:
            return None  # its files were deleted
        ticket = Ticket(self._admission, stored.spec.task_name)
        episode = self.make(stored.spec, stored.suite, ticket, self.closed_trajectory(handle))
        episode.restore(stored)
        self.add(episode)
        return episode

    def create_trajectory(self, handle: str, on_error: ExitStack) -> Trajectory:
        """The trajectory of a new episode, with room for its verdict, so that a full disk is found now."""
        options, folder = self._options, self.folder(handle)
        try:
            trajectory = Trajectory(folder, max_calls_bytes=MAX_LOG_BYTES, disk=options.disk).create()
            on_error.callback(shutil.rmtree, folder, ignore_errors=True)
            on_error.callback(trajectory.close)
            KeptFiles(folder).reserve_verdict()
        except OSError as error:
            if not is_full(error):
                raise
            raise AtCapacityError(
                f"the state folder has no room for another episode: {error.strerror}",
                retryAfterSeconds=RETRY_SECONDS,
            ) from None
        return trajectory

    def reopen_trajectory(self, handle: str) -> Trajectory:
        """The trajectory of an episode of a dead server. Raises OSError."""
        options, folder = self._options, self.folder(handle)
        trajectory = Trajectory(folder, max_calls_bytes=MAX_LOG_BYTES, disk=options.disk).reopen()
        KeptFiles(folder).reserve_again()
        return trajectory

    def closed_trajectory(self, handle: str) -> Trajectory:
        """The trajectory of an episode that is over, whatever is in its folder. Opens nothing."""
        return Trajectory(self.folder(handle), disk=self._options.disk)
