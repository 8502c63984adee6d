"""Opening episodes with retries: whole openings that failed are made again, as new episodes.

Requests whose connection was lost are another matter (`resending.py`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import Any, TypeAlias, TypedDict

import anyio

from decathlon_client.client_episode import Episode
from decathlon_client.client_errors import (
    AtCapacityError,
    ClientError,
    ConnectionLostError,
    SandboxLostError,
    SetUpError,
)
from decathlon_client.client_values import JsonObject, OnProgress, Policy, Task, check_labels
from decathlon_client.resends import ResendPolicy
from decathlon_client.task_groups import CloseBudget

TRIES = 3
PATIENCE_SECONDS = 3600.0
FIRST_PAUSE_SECONDS = 1.0
"""Pause after the first failure; doubled after each further one."""
AWAY_PAUSE_SECONDS = 5.0
"""Mean pause between two tries while the server is away; each try sends its requests again by itself."""

log = logging.getLogger("decathlon.client")


class OpeningOptions(TypedDict, total=False):
    """Options for every episode of a lockstep or a batch, as for `Decathlon.episode`."""

    launch_time: datetime | str | None
    max_calls: int | None
    policy: Policy | None
    tries: int
    """How often an opening is tried, by default 3 times."""
    patience_seconds: float
    """How long a full or absent server is asked again, by default 3600."""
    labels: Mapping[str, str]
    """Names and short texts by which the episodes are found later."""
    outside: bool
    snapshots: int | None


RETRIES: OpeningOptions = {"tries": TRIES, "patience_seconds": PATIENCE_SECONDS}
"""What `Decathlon.episode` is given to open an episode as a batch does."""

OpenEpisode: TypeAlias = Callable[
    [JsonObject, CloseBudget, OnProgress | None], AbstractAsyncContextManager[Episode]
]
"""Opens one episode with these arguments of `start_episode`, without retries."""


class EpisodeOpener:
    """Opens the episodes of one lockstep or one batch, or a single episode; they share a close budget."""

    def __init__(
        self, open_episode: OpenEpisode, resend_policy: ResendPolicy, options: OpeningOptions
    ) -> None:
        """Raises ValueError or TypeError for wrong options."""
        if unknown := [name for name in options if name not in OpeningOptions.__annotations__]:
            known = ", ".join(OpeningOptions.__annotations__)
            raise TypeError(f"an episode has no option {unknown[0]!r}; its options are {known}")
        check_labels(options.get("labels") or {})
        for name, least in (("tries", 1), ("patience_seconds", 0)):
            if not options.get(name, least) >= least:  # also for NaN
                raise ValueError(f"{name} must be at least {least}, not {options.get(name)}")
        self.close_budget = CloseBudget()
        self._open_episode = open_episode
        self._resend_policy = resend_policy
        self._options = options

    @property
    def away_seconds(self) -> float | None:
        """How long the server has not been reached; None while it answers."""
        return self._resend_policy.away_seconds

    @asynccontextmanager
    async def open(
        self,
        task: str | Task | None,
        *,
        draw: Mapping[str, Any] | None = None,
        launch_time: str | None = None,
        labels: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> AsyncGenerator[Episode]:
        """Open an episode of the task, or without one of a task that is drawn. Raises the last try's error.

        `launch_time`: used if the options have none. `labels`: added to the options' labels.
        """
        when = self._options.get("launch_time") or launch_time
        arguments = {
            **(draw or {}),
            "task": task.id if isinstance(task, Task) else task,
            "launch_time": when.isoformat() if isinstance(when, datetime) else when,
            "max_calls": self._options.get("max_calls"),
            "policy": self._options.get("policy"),
            "outside": self._options.get("outside") or None,
            "snapshots": self._options.get("snapshots"),
            "labels": {**(self._options.get("labels") or {}), **(labels or {})} or None,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        async with AsyncExitStack() as stack:
            episode = await self._open(stack, arguments, on_progress)
            log.info("Episode %s of %s is open", episode.page or episode.public_id, episode.task)
            yield episode

    async def _open(
        self, stack: AsyncExitStack, arguments: JsonObject, on_progress: OnProgress | None
    ) -> Episode:
        deadline = anyio.current_time() + self._options.get("patience_seconds", PATIENCE_SECONDS)
        failures = 0
        while True:
            try:
                opening = self._open_episode(arguments, self.close_budget, on_progress)
                return await stack.enter_async_context(opening)
            except ClientError as error:
                pause_seconds = self._wait_seconds(error)
                if pause_seconds is None:
                    failures += 1
                    may_pass = error.retryable or isinstance(error, (SandboxLostError, SetUpError))
                    if not may_pass or failures >= self._options.get("tries", TRIES):
                        raise
                    pause_seconds = _spread(FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
                elif anyio.current_time() + pause_seconds > deadline:
                    raise
                log.info(
                    "Opening an episode again after a failure%s: %s",
                    f" of {error.page or error.episode}" if error.episode else "",
                    error.message,
                )
            await anyio.sleep(pause_seconds)

    def _wait_seconds(self, error: ClientError) -> float | None:
        """How long to wait for a server that is full or went away; None for any other failure."""
        if isinstance(error, AtCapacityError):
            return error.retry_after_seconds
        # Requests that are never sent again say that it is not to be waited for: an embedded server is gone
        # for good.
        if isinstance(error, ConnectionLostError) and self._resend_policy.seconds > 0:
            return _spread(AWAY_PAUSE_SECONDS)
        return None


def refuse_text(tasks: object) -> None:
    """Raise TypeError for one task in the place of several: the letters of its id are no tasks."""
    if isinstance(tasks, (str, Task)):
        raise TypeError(f"the tasks must be an iterable, such as [{str(getattr(tasks, 'id', tasks))!r}]")


def _spread(seconds: float) -> float:
    """A pause of about this length, so that the episodes of a batch do not all come back at once."""
    return seconds * random.uniform(0.5, 1.5)
