"""Opening episodes with retries: whole openings that failed are made again, as new episodes.

Requests whose connection was lost are another matter (`resending.py`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import Protocol, TypedDict

import anyio

from decathlon_client.close_budget import CloseBudget
from decathlon_client.episode import Episode
from decathlon_client.errors import (
    AtCapacityError,
    ClientError,
    ConnectionLostError,
    SandboxLostError,
    SetUpError,
)
from decathlon_client.resending import ResendPolicy
from decathlon_client.values import Policy, Task

TRIES = 3
PATIENCE_SECONDS = 3600.0
FIRST_PAUSE_SECONDS = 1.0
"""Pause after the first failure; doubled after each further one."""
AWAY_PAUSE_SECONDS = 5.0
"""Mean pause between two tries while the server is away; each try sends its requests again by itself."""

log = logging.getLogger("decathlon.client")


class OpeningOptions(TypedDict, total=False):
    """Options for every episode of a lockstep or a batch.

    `launch_time`, `max_calls` and `policy`: as for `Decathlon.episode`. `tries`: how often opening an episode
    is tried before its failure counts [3]. `patience_seconds`: how long a full server is asked again, at the
    intervals that it names, and how long one that went away is waited for [3600].
    """

    launch_time: datetime | str | None
    max_calls: int | None
    policy: Policy | None
    tries: int
    patience_seconds: float


class OpenEpisode(Protocol):
    """Opens one episode, without retries."""

    def __call__(
        self,
        task: str,
        *,
        close_budget: CloseBudget,
        launch_time: datetime | str | None,
        max_calls: int | None,
        policy: Policy | None,
    ) -> AbstractAsyncContextManager[Episode]: ...


class EpisodeOpener:
    """Opens the episodes of one lockstep or one batch, which share a close budget."""

    def __init__(
        self, open_episode: OpenEpisode, options: OpeningOptions, resend_policy: ResendPolicy
    ) -> None:
        self.close_budget = CloseBudget()
        self._open_episode = open_episode
        self._options = options
        self._resend_policy = resend_policy

    @property
    def away_seconds(self) -> float | None:
        """How long the server has not been reached; None while it answers."""
        return self._resend_policy.away_seconds

    @asynccontextmanager
    async def open(
        self, task: str | Task, *, launch_time: datetime | str | None = None
    ) -> AsyncGenerator[Episode]:
        """Open an episode of the task. Raises the error of the last try.

        `launch_time`: if the options have none.
        """
        deadline = anyio.current_time() + self._options.get("patience_seconds", PATIENCE_SECONDS)
        async with AsyncExitStack() as stack:
            failures = 0
            while True:
                try:
                    episode = await stack.enter_async_context(self._open_once(task, launch_time))
                    break
                except ClientError as error:
                    failures += not (isinstance(error, AtCapacityError) or self._may_come_back(error))
                    pause_seconds = self._pause_seconds(error, failures)
                    if pause_seconds is None or anyio.current_time() + pause_seconds > deadline:
                        raise
                    log.info("Opening an episode again after a failure: %s", error.message)
                    await anyio.sleep(pause_seconds)
            yield episode

    def _open_once(
        self, task: str | Task, launch_time: datetime | str | None
    ) -> AbstractAsyncContextManager[Episode]:
        return self._open_episode(
            task if isinstance(task, str) else task.id,
            close_budget=self.close_budget,
            launch_time=self._options.get("launch_time") or launch_time,
            max_calls=self._options.get("max_calls"),
            policy=self._options.get("policy"),
        )

    def _pause_seconds(self, error: ClientError, failures: int) -> float | None:
        """The pause before the next try; None if there is to be none."""
        if isinstance(error, AtCapacityError):
            return error.retry_after_seconds
        if self._may_come_back(error):
            return AWAY_PAUSE_SECONDS * random.uniform(0.5, 1.5)
        may_pass = error.retryable or isinstance(error, (SandboxLostError, SetUpError))
        if not may_pass or failures >= self._options.get("tries", TRIES):
            return None
        # Spread out, so that the episodes of a batch do not all come back at the same moment.
        return FIRST_PAUSE_SECONDS * 2 ** (failures - 1) * random.uniform(0.5, 1.5)

    def _may_come_back(self, error: ClientError) -> bool:
        """Whether the error means that the server went away, and it is to be waited for."""
        # Requests that are never sent again say that it is not: an embedded server is gone for good.
        return isinstance(error, ConnectionLostError) and self._resend_policy.seconds > 0
