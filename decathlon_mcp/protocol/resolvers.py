"""How requests lead to their episode: a session at a task's address, an episode's address, a pipe."""

from __future__ import annotations

from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import UnknownEpisodeError
from decathlon_mcp.protocol.context import Context, base_url_of, request_context_of


def episode_address(ctx: Context, episode_id: str) -> str | None:
    """Where an episode is reached by every revision and from any connection; None over a pipe."""
    base_url = base_url_of(ctx)
    return f"{base_url}/episodes/{episode_id}/mcp" if base_url else None


class AddressResolver:
    """`/episodes/{id}/mcp`: the address is the episode, whoever connects and however often."""

    handshake_only = False

    def access(self, ctx: Context) -> EpisodeAccess:
        access = request_context_of(ctx).access
        if access is None:
            raise UnknownEpisodeError("this session has no episode: initialize a new one")
        return access

    def opened(self, ctx: Context) -> EpisodeAccess:
        return self.access(ctx)

    def address(self, ctx: Context, access: EpisodeAccess) -> str | None:
        return episode_address(ctx, access.id)


class TaskSessionResolver(AddressResolver):
    """`/tasks/{id}/mcp`: the session is the episode, opened at `initialize`."""

    handshake_only = True

    def __init__(self, episodes: EpisodeRegistry) -> None:
        self._episodes = episodes

    def opened(self, ctx: Context) -> EpisodeAccess:
        request_context = request_context_of(ctx)
        if request_context.access is not None:
            return request_context.access
        assert request_context.task_id is not None
        request_context.access = EpisodeAccess.by_session(
            self._episodes.start(request_context.task_id, request_context.principal),
            request_context.principal,
        )
        return request_context.access


class FixedResolver(AddressResolver):
    """A pipe whose process, or whose in-memory client, is the episode."""

    def __init__(self, access: EpisodeAccess) -> None:
        self._seat = access

    def access(self, ctx: Context) -> EpisodeAccess:
        return self._seat
