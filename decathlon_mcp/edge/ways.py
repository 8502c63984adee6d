"""How requests lead to their episode: a session at a task's address, an episode's address, a pipe."""

from __future__ import annotations

from decathlon_mcp.edge.visit import Context, base_url_of, visit_of
from decathlon_mcp.episodes import Episodes, Seat
from decathlon_mcp.errors import UnknownEpisodeError


def episode_address(ctx: Context, episode_id: str) -> str | None:
    """Where an episode is reached by every revision and from any connection; None over a pipe."""
    base_url = base_url_of(ctx)
    return f"{base_url}/episodes/{episode_id}/mcp" if base_url else None


class AddressWay:
    """`/episodes/{id}/mcp`: the address is the episode, whoever connects and however often."""

    handshake_only = False

    def seat(self, ctx: Context) -> Seat:
        seat = visit_of(ctx).seat
        if seat is None:
            raise UnknownEpisodeError("this session has no episode: initialize a new one")
        return seat

    def opened(self, ctx: Context) -> Seat:
        return self.seat(ctx)

    def address(self, ctx: Context, seat: Seat) -> str | None:
        return episode_address(ctx, seat.id)


class TaskWay(AddressWay):
    """`/tasks/{id}/mcp`: the session is the episode, opened at `initialize`."""

    handshake_only = True

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    def opened(self, ctx: Context) -> Seat:
        visit = visit_of(ctx)
        if visit.seat is not None:
            return visit.seat
        assert visit.task_id is not None
        visit.seat = Seat.at_session(self._episodes.start(visit.task_id, visit.caller), visit.caller)
        return visit.seat


class PipeWay(AddressWay):
    """A pipe whose process, or whose in-memory client, is the episode."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def seat(self, ctx: Context) -> Seat:
        return self._seat
