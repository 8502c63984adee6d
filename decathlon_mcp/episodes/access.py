"""Who asks: a token's holder, an MCP session, or somebody who knows an address.

Who sits where at an episode: whoever plays it, and whoever may judge it too.

An episode has two ids, each a capability of its own. Its handle is for whoever started it; its agent's id
leads to an address that can be handed to an agent: it plays, and can neither evaluate nor see the verdict,
whatever the policy, and needs no token. Decided 2026-11-21: a token in an agent's hands could start other
episodes of the same task and have its guesses evaluated there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decathlon_mcp.settings import RewardPolicy

Role = Literal["player", "controller", "admin"]


@dataclass(frozen=True, slots=True)
class Principal:
    """`token`: name of the token shown, None on a server without tokens. `session`: the MCP session."""

    token: str | None = None
    role: Role = "player"
    session: str | None = None

    @property
    def controls(self) -> bool:
        """Is this a controller's token, or an administrator's?"""
        return self.role != "player"

    def may_use(self, owner: Principal) -> bool:
        """May this caller use an episode of `owner`, given that it knows the episode's id?"""
        return owner.token is None or self.role == "admin" or self.token == owner.token

    def owns(self, owner: Principal) -> bool:
        """Is an episode of `owner` one of this caller's own, to be listed without its id being known?"""
        if self.role == "admin":
            return True
        if owner.token is not None or self.token is not None:
            return owner.token == self.token
        return self.session is not None and self.session == owner.session


def may_evaluate(policy: RewardPolicy, principal: Principal) -> bool:
    """May this caller evaluate what it has the handle of?"""
    return policy != "controller" or principal.token is None or principal.controls
