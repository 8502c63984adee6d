"""Principals: who sends a request, and what the server's tokens and reward policy allow them.

An episode has two ids, and each is a capability. The handle is for the client that started the episode. The
agent id leads to an address that can be given to an agent: it can play, but cannot evaluate or see the
verdict, whatever the policy, and needs no token.

Decided 2026-11-21: an agent gets its own id and not a token. With a token it could start other episodes of
the same task and evaluate guesses there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.settings import RewardPolicy

Role = Literal["player", "controller", "admin"]


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request.

    `token` is the name of the token that was presented, None on a server without tokens. `session` is the id
    of the MCP session, if there is one. `alone`: nobody else can use the server, as it has one token or none.
    """

    token: str | None = None
    role: Role = "player"
    session: str | None = None
    alone: bool = True

    @property
    def share_key(self) -> str | None:
        """Whose share of the server's capacity a request uses; None if there is nobody to share with."""
        return None if self.alone else self.token

    @property
    def controls(self) -> bool:
        """Whether the token belongs to a controller or an administrator."""
        return self.role != "player"

    def in_session(self, session: str | None) -> Principal:
        """The same principal in this MCP session."""
        # `replace` takes twice as long, and every request needs this.
        return Principal(self.token, self.role, session, self.alone)

    def may_use(self, owner: Principal) -> bool:
        """Whether this principal may use an episode of `owner` when it knows the episode's id."""
        return owner.token is None or self.role == "admin" or self.token == owner.token

    def owns(self, owner: Principal) -> bool:
        """Whether an episode of `owner` appears in this principal's list of episodes."""
        if self.role == "admin":
            return True
        if owner.token is not None or self.token is not None:
            return owner.token == self.token
        # Without tokens only the MCP session distinguishes clients.
        return self.session is not None and self.session == owner.session


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
