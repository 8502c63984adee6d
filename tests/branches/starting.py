"""Branches of a running registry, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.protocol.lobby_tools import start_tool

PLAYER = Principal()


async def start_with(registry: EpisodeRegistry, principal: Principal = PLAYER, **arguments: Any) -> Episode:
    """Start an episode as `start_episode` does with these arguments."""
    return await start_tool().from_arguments(arguments).start(registry, principal)


def is_exact(episode: Episode) -> bool:
    """Whether a branch's sandbox is a copy of the other's, as it stood after the call."""
    return bool(episode.reported["branch"].get("exact"))
