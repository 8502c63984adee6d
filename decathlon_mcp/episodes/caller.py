"""Who asks: a token's holder, an MCP session, or somebody who knows an address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["player", "controller", "admin"]


@dataclass(frozen=True, slots=True)
class Caller:
    """`token`: name of the token shown, None on a server without tokens. `session`: the MCP session."""

    token: str | None = None
    role: Role = "player"
    session: str | None = None

    @property
    def controls(self) -> bool:
        """Is this a controller's token, or an administrator's?"""
        return self.role != "player"

    def may_use(self, owner: Caller) -> bool:
        """May this caller use an episode of `owner`, given that it knows the episode's id?"""
        return owner.token is None or self.role == "admin" or self.token == owner.token

    def owns(self, owner: Caller) -> bool:
        """Is an episode of `owner` one of this caller's own, to be listed without its id being known?"""
        if self.role == "admin":
            return True
        if owner.token is not None or self.token is not None:
            return owner.token == self.token
        return self.session is not None and self.session == owner.session
