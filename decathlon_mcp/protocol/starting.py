"""Starting an episode as `start_episode` asks for it, and what its starter learns about it."""

from __future__ import annotations

from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.protocol.context import episode_address
from decathlon_mcp.protocol.lobby_tools import StartEpisode
from decathlon_mcp.types import JsonObject


def start_episode(
    registry: EpisodeRegistry,
    call: StartEpisode,
    principal: Principal,
    *,
    operation: str | None,
    held: bool = False,
) -> Episode:
    """Start the episode, of a drawn task if none is named. Raises what `EpisodeRegistry.start` and `draw` do.

    `operation`: id of the request; one that is sent again gets the episode that the first one has started.
    """
    # A request that is sent again does not draw again.
    task = call.task or registry.task_started_by(operation, principal)
    return registry.start(
        task or registry.draw(call, principal),
        principal,
        launch_time=call.launch_time,
        policy=call.policy,
        max_calls=call.max_calls,
        operation=operation,
        held=held,
    )


def describe_start(registry: EpisodeRegistry, episode: Episode, base_url: str | None) -> JsonObject:
    """The result of `start_episode`, without tools. `base_url`: the server's; None without HTTP."""
    return {
        "episode": episode.id,
        "task": episode.task_name,
        "address": episode_address(base_url, episode.id),
        "agent": episode.agent_id,
        "agent_address": episode_address(base_url, episode.agent_id),
        "policy": episode.policy,
        "phase": str(episode.state.phase),
        "prompt": episode.prompt.instructions,
        "first_use_seconds": episode.spec.limits.first_use_seconds,
        "lease_seconds": registry.idle_seconds,
    }
