"""Opening an episode with patience: only the opening is ever tried again, never what is done in it."""

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
from decathlon_client.errors import AtCapacityError, ClientError, SandboxLostError, SetUpError
from decathlon_client.values import Policy, Task

TRIES = 3
PATIENCE_SECONDS = 3600.0
PAUSE_SECONDS = 1.0
"""After the first failure; twice as long after each further one."""

log = logging.getLogger("decathlon.client")


class OpeningOptions(TypedDict, total=False):
    """What may be asked of every episode of a lockstep or a batch.

    `launch_time`, `max_calls` and `policy` are `Decathlon.episode`'s. `tries`: how often one is opened before
    its failure counts [3]; a full server is asked again, as often as it says, for `patience_seconds` [3600].
    """

    launch_time: datetime | str | None
    max_calls: int | None
    policy: Policy | None
    tries: int
    patience_seconds: float


class Open(Protocol):
    """Opens one episode, once."""

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
    """Opens the episodes of one lockstep or one batch, which are parted from together."""

    def __init__(self, open_once: Open, options: OpeningOptions) -> None:
        self.close_budget = CloseBudget()
        self._open = open_once
        self._options = options

    @asynccontextmanager
    async def opened(self, task: str | Task) -> AsyncGenerator[Episode]:
        """An episode of the task; raises what the last try said."""
        until = anyio.current_time() + self._options.get("patience_seconds", PATIENCE_SECONDS)
        async with AsyncExitStack() as stack:
            failed = 0
            while True:
                try:
                    episode = await stack.enter_async_context(self._once(task))
                    break
                except ClientError as error:
                    failed += not isinstance(error, AtCapacityError)
                    pause = self._pause(error, failed)
                    if pause is None or anyio.current_time() + pause > until:
                        raise
                    log.info("An episode is opened once more: %s", error.message)
                    await anyio.sleep(pause)
            yield episode

    def _once(self, task: str | Task) -> AbstractAsyncContextManager[Episode]:
        return self._open(
            task if isinstance(task, str) else task.id,
            close_budget=self.close_budget,
            launch_time=self._options.get("launch_time"),
            max_calls=self._options.get("max_calls"),
            policy=self._options.get("policy"),
        )

    def _pause(self, error: ClientError, failed: int) -> float | None:
        """In seconds, before the next try; None where there is none."""
        if isinstance(error, AtCapacityError):
            return error.retry_after_seconds
        passing = error.retryable or isinstance(error, (SandboxLostError, SetUpError))
        if not passing or failed >= self._options.get("tries", TRIES):
            return None
        return PAUSE_SECONDS * 2 ** (failed - 1) * random.uniform(0.5, 1.5)
