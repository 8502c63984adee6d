"""Who sits where at an episode: whoever plays it, and whoever may judge it too.

An episode has two ids, each a capability of its own. Its handle is for whoever started it; its agent's id
leads to an address that can be handed to an agent: it plays, and can neither evaluate nor see the verdict,
whatever the policy, and needs no token. Decided 2026-11-21: a token in an agent's hands could start other
episodes of the same task and have its guesses evaluated there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from decathlon_mcp.episodes.caller import Caller
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.settings import RewardPolicy


def may_judge(policy: RewardPolicy, caller: Caller) -> bool:
    """May this caller evaluate what it has the handle of?"""
    return policy != "controller" or caller.token is None or caller.controls


@dataclass(frozen=True, slots=True)
class Seat:
    """One client's place. `id`: by which of the two it knows the episode. `judges`: may it evaluate?"""

    episode: Episode
    id: str
    judges: bool

    @classmethod
    def at_handle(cls, episode: Episode, caller: Caller) -> Self:
        """Of who knows the handle; on a server with tokens, its role must allow it too."""
        return cls(episode, episode.id, may_judge(episode.policy, caller))

    @classmethod
    def at_session(cls, episode: Episode, caller: Caller) -> Self:
        """Of a session, or a pipe, that is the episode: an agent's, unless its token says otherwise."""
        judges = episode.policy != "controller" or caller.controls
        return cls(episode, episode.id if judges else episode.agent_id, judges)

    @classmethod
    def of_agent(cls, episode: Episode) -> Self:
        """Of who knows the agent's id and no more."""
        return cls(episode, episode.agent_id, judges=False)
