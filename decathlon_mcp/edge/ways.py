"""How requests lead to their episode: a session at a task's address, an episode's address, a pipe."""

from __future__ import annotations

from decathlon_mcp.edge.visit import Context, base_url_of, visit_of
from decathlon_mcp.episodes import Episode, Episodes
from decathlon_mcp.errors import UnknownEpisodeError


def episode_address(ctx: Context, episode: Episode) -> str | None:
    """Where an episode is reached by every revision and from any connection; None over a pipe."""
    base_url = base_url_of(ctx)
    return f"{base_url}/episodes/{episode.id}/mcp" if base_url else None


class AddressWay:
    """`/episodes/{id}/mcp`: the address is the episode, whoever connects and however often."""

    handshake_only = False

    def episode(self, ctx: Context) -> Episode:
        episode = visit_of(ctx).episode
        if episode is None:
            raise UnknownEpisodeError("this session has no episode: initialize a new one")
        return episode

    def opened(self, ctx: Context) -> Episode:
        return self.episode(ctx)

    def address(self, ctx: Context, episode: Episode) -> str | None:
        return episode_address(ctx, episode)


class TaskWay(AddressWay):
    """`/tasks/{id}/mcp`: the session is the episode, opened at `initialize`."""

    handshake_only = True

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    def opened(self, ctx: Context) -> Episode:
        visit = visit_of(ctx)
        assert visit.task_id is not None
        visit.episode = self._episodes.start(visit.task_id, visit.caller)
        return visit.episode


class PipeWay(AddressWay):
    """A pipe whose process, or whose in-memory client, is the episode."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def episode(self, ctx: Context) -> Episode:
        return self._episode
