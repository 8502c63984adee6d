"""What is fixed when an episode starts, and how its attempt was closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.limits import EpisodeLimits
from decathlon_mcp.grading.attempt import TruncationCause
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.suites.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What is fixed when an episode starts.

    `id` (the handle) and `agent_id` are capabilities of 192 bits. `task_name` is the task's id as clients
    spell it. `limits` are those of this episode. `operation`: id of the request that started it, by which a
    repeated request finds it. `keeps_workspace`: what a later grading needs is kept. `held`: it ends with the
    response to the request that started it.
    """

    id: str
    agent_id: str
    task: Task
    task_name: str
    owner: Principal
    launch_time: datetime
    policy: RewardPolicy
    limits: EpisodeLimits
    operation: str | None = None
    keeps_workspace: bool = False
    held: bool = False

    @property
    def label(self) -> str:
        """The first 48 bits of the handle, for logs and the names of containers."""
        return self.id[:12]


@dataclass(frozen=True, slots=True)
class Claim:
    """How an attempt was closed: by its agent, by a limit, or by `evaluate`.

    `truncated_by`: what cut the attempt short. `turns`: the agent's turns, if a controller reports them.
    `operation`: id of the request that closed it, by which a client that comes back is known. `calls`: how
    many had been sent.
    """

    by_agent: bool
    answer: str | None = None
    truncated_by: TruncationCause | None = None
    turns: int | None = None
    operation: str | None = None
    calls: int = 0
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
