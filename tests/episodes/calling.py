"""Calls of an episode's tools, without a client."""

from __future__ import annotations

from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.call import Waiter
from decathlon_mcp.episodes.episode import Episode


async def make_call(
    episode: Episode, name: str, params: CallParams, *, waiter: Waiter | None = None
) -> Reply:
    """Call a tool and return the reply. Raises what `accept` and `reply_of` raise."""
    waiter = waiter or Waiter()
    call = await episode.calls.accept(name, params, waiter)
    try:
        return await episode.calls.reply_of(call, waiter)
    finally:
        call.remove(waiter, handed_over=True)
