"""The page of a server: the state of the server's episodes, and who may look."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from anyio import from_thread

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.http.health import server_state
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.page.access import PageKey, Secrets, Sessions, load_or_create_page_key
from decathlon_mcp.plugins.page.application import PageApp
from decathlon_mcp.plugins.page.live import LiveEpisode, LiveFeed, Snapshot
from decathlon_mcp.plugins.page.play.attempts import RUN, PlayPages
from decathlon_mcp.plugins.page.site import Site
from decathlon_mcp.plugins.page.stored_runs import delete_run, pin_run
from decathlon_mcp.protocol.lobby_tools import start_tool
from decathlon_mcp.types import public_id


class RegistryLive:
    """The state of a server with this registry, for the page."""

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry = registry

    @property
    def stopping(self) -> bool:
        return self._registry.closing

    def snapshot(self) -> Snapshot:
        admission = self._registry.admission
        state, _ = server_state(self._registry)
        return Snapshot(
            episodes=tuple(map(_live_episode, self._registry.live)),
            state=str(state).replace("_", " "),
            queued=admission.queued,
            sandboxes=admission.active,
            places=admission.max_sandboxes,
        )


class RegistryControl:
    """What people change on a server with this registry. Called in worker threads."""

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry = registry

    def end(self, episode_id: str) -> bool:
        return from_thread.run_sync(self._end, episode_id)

    def _end(self, episode_id: str) -> bool:
        for episode in self._registry.live:
            if public_id(episode.id) == episode_id:
                episode.close(Ending.CLOSED)
                return True
        return False

    def branch(self, episode_id: str, at: int, principal: Principal) -> str:
        return from_thread.run(self._branch, episode_id, at, principal)

    async def _branch(self, episode_id: str, at: int, principal: Principal) -> str:
        handle = self._registry.handle_of(episode_id)
        # With this label its starter plays on by hand. People see what differs, and decide.
        arguments = {"branch_of": handle, "at": at, "on_difference": "report", "labels": {"run": RUN}}
        call = start_tool().from_arguments(arguments)
        return (await call.start(self._registry, principal)).public_id

    def pin(self, run: str, owner: str | None, *, pinned: bool) -> None:
        if (store := self._registry.store) is not None:
            from_thread.run_sync(partial(pin_run, store, run, pinned=pinned, owner=owner))

    def delete(self, run: str, owner: str | None) -> int:
        if (store := self._registry.store) is None:
            return 0
        return from_thread.run(partial(delete_run, store, self._registry.options.journals, run, owner=owner))


def _live_episode(episode: Episode) -> LiveEpisode:
    labels = episode.spec.labels
    return LiveEpisode(
        public_id=public_id(episode.id),
        task=episode.spec.task_name,
        suite=episode.sandbox_factory.suite.name,
        run=labels.get("run"),
        model=labels.get("model"),
        owner=episode.spec.owner.token,
        phase=str(episode.state.phase),
        calls=episode.calls.sent,
        replies=episode.trajectory.index.answered,
        started_at=episode.started_at,
        waiting_for=episode.ticket.waiting_for,
    )


def create_page(
    registry: EpisodeRegistry,
    state: Path,
    tokens: Tokens,
    hosts: AllowedHosts,
    public_url: str | None = None,
) -> PageApp:
    """The page of a server on a state folder.

    Raises SettingsError if the key of the page cannot be read or written.
    """
    key = None if tokens else load_or_create_page_key(state)
    accepted: Secrets = tokens if key is None else PageKey(key)
    site = Site(
        EpisodeHistory([state]),
        Sessions(accepted),
        live=LiveFeed(RegistryLive(registry)),
        control=RegistryControl(registry),
        folders=(str(state),),
        public_url=public_url,
    )
    site.can_play = True
    routes = PlayPages(site, registry).routes()
    return PageApp(site, hosts.answers_to, public_url=public_url, routes=routes, key=key)
