"""Limits of one episode: the time that each part may take, the number of calls, the size of the workspace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from decathlon_mcp.suites.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The server's defaults or, after `for_task`, the limits of one episode.

    `idle_seconds`: time without a request after which the episode ends. `first_use_seconds`: time from READY
    to the first request. `grace_seconds`: time that a client whose connection broke has to come back.
    `episode_seconds`: longest time from admission to the claim. `servers_seconds`: for the task's servers to
    start. `set_up_seconds`: for the whole set-up, `preprocess_seconds` within it. `max_calls` None: no limit.
    """

    idle_seconds: float
    first_use_seconds: float
    grace_seconds: float
    episode_seconds: float
    servers_seconds: float
    preprocess_seconds: float
    set_up_seconds: float
    evaluation_seconds: float
    workspace_bytes: int
    max_calls: int | None = None

    def for_task(self, task: Task, max_calls: int | None = None) -> Self:
        """These limits with the task's own deadlines; `max_calls` replaces the default if given."""
        deadlines = task.deadlines.model_dump(exclude_none=True)
        return replace(self, max_calls=max_calls or self.max_calls, **deadlines)
