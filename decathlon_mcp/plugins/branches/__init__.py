"""Episodes that begin where others stood: saved states, branches, and tasks that are set up once.

Here is what clients ask when they start an episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict

from decathlon_mcp.types import JsonObject

if TYPE_CHECKING:
    from decathlon_mcp.episodes.episode import Episode
    from decathlon_mcp.episodes.specification import EpisodeSpec
_NAME = "branches"


OnDifference: TypeAlias = Literal["refuse", "report"]


class BranchOptions(BaseModel):
    """What a client asks of one episode, in `EpisodeSpec.plugins`."""

    model_config = ConfigDict(frozen=True)

    on_difference: OnDifference = "refuse"
    """What a reply does that differs from the other episode's: `refuse` ends the branch as an episode whose
    set-up failed, `report` counts the reply."""
    outside: bool = False
    """Whether calls may be made again that reach what episodes share."""
    snapshots: int | None = None
    """The state is saved after every so many calls; None: only when asked."""

    def member(self) -> dict[str, JsonObject]:
        """The options as a member of `EpisodeSpec.plugins`; empty if all are the defaults."""
        options = self.model_dump(exclude_defaults=True)
        return {_NAME: options} if options else {}

    @classmethod
    def of(cls, spec: EpisodeSpec) -> Self:
        """The options of an episode."""
        return cls.model_validate(spec.plugins.get(_NAME, {}))


@dataclass(frozen=True, slots=True)
class Branch:
    """Where an episode branches from another: the new episode starts as the other stood after call `at`.

    `episode`: public id of the other episode. Calls 1 to `at` are copied from the other, with their numbers.
    """

    episode: str
    at: int

    @classmethod
    def of(cls, spec: EpisodeSpec) -> Self | None:
        """None for an episode that is played whole."""
        member = spec.reported.get("branch")
        return None if member is None else cls(member["episode"], member["at"])

    @property
    def reported(self) -> JsonObject:
        """The member `branch` of what the episode reports."""
        return {"branch": {"episode": self.episode, "at": self.at, "differences": 0}}


def note_branch(episode: Episode, **members: Any) -> JsonObject:
    """Note more members of what a branch reports, and return all."""
    member = {**episode.reported["branch"], **members}
    episode.records.note_facts(branch=member)
    return member
