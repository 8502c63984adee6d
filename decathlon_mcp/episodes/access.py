"""What clients may do with an episode, by the id that they know, their token and the reward policy.

Decided 2026-11-21: an agent gets its own id and not a token. With a token it could start other episodes of
the same task and evaluate guesses there.
"""

from __future__ import annotations

from typing import Self, get_args

import msgspec

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.settings import RewardPolicy


def may_evaluate(policy: RewardPolicy, principal: Principal) -> bool:
    """Whether this principal may evaluate an episode whose handle it knows."""
    return policy != "controller" or principal.token is None or principal.controls


def choose_policy(
    requested: RewardPolicy | None, default: RewardPolicy, principal: Principal
) -> RewardPolicy:
    """The reward policy of a new episode.

    Raises AccessDeniedError if the requested policy reveals more than the server's default and the principal
    is not a controller.
    """
    if requested is None:
        return default
    order = get_args(RewardPolicy)
    if not principal.controls and order.index(requested) < order.index(default):
        raise AccessDeniedError(
            f"this server's policy of the reward is {default!r}: only a controller's token may start an "
            f"episode with one more open, such as {requested!r}"
        )
    return requested


class EpisodeAccess(msgspec.Struct, frozen=True):
    """What one client may do with an episode.

    `id` is the capability that the client presented: the episode's handle or its agent id. `reports_turns`:
    it is a controller, whose report of the agent's turns counts.
    """

    episode: Episode
    id: str
    can_evaluate: bool
    reports_turns: bool = False

    @classmethod
    def by_handle(cls, episode: Episode, principal: Principal) -> Self:
        """Access for a client that knows the handle.

        With tokens configured and policy `controller`, evaluation also requires a controller's token.
        """
        can_evaluate = may_evaluate(episode.spec.policy, principal)
        # With a more open policy, the agent itself may know the handle.
        reports_turns = can_evaluate and (episode.spec.policy == "controller" or principal.controls)
        return cls(episode, episode.id, can_evaluate, reports_turns)

    @classmethod
    def by_session(cls, episode: Episode, principal: Principal) -> Self:
        """Access for a session or a stdio connection that is the episode."""
        # Under policy `controller` such a client counts as an agent unless its token says otherwise, also on
        # a server without tokens: it never had to know the handle.
        can_evaluate = episode.spec.policy != "controller" or principal.controls
        return cls(episode, episode.id if can_evaluate else episode.spec.agent_id, can_evaluate)

    @classmethod
    def by_agent_id(cls, episode: Episode) -> Self:
        """Access for a client that knows only the agent id."""
        return cls(episode, episode.spec.agent_id, can_evaluate=False)
