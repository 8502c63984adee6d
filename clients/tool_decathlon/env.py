"""`ToolDecathlonEnv`: tasks to draw from, and an episode for each attempt; it starts its own server."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack

from decathlon_client import Decathlon, Episode, Filters, OpeningOptions, Task
from decathlon_client.client_values import URL_VARIABLE
from decathlon_client.local_server import ChildEndpoint


class ToolDecathlonEnv:
    """An environment: draws tasks, and plays each attempt in a sandbox of its own.

    Use it in `async with`. Without `url`, and without `DECATHLON_URL`, the server runs in this process. The
    server needs `decathlon-mcp[server,starter]`. Where its packages do not fit beside a trainer's, `server`
    is the program `decathlon-mcp` of another environment, which runs as a child while the environment is
    open.

    `suite`: `starter`, which is bundled, or the folder of a Toolathlon checkout, or several. `seed` makes the
    draws of `sample` repeatable. `filters` restrict the tasks, by `needs`, `without`, `search` and the rest.
    `settings` are the server's, by name: `provider="docker"`, `max_sandboxes=64`. Raises TypeError for a
    suite or settings beside a `url`: the server there has its own.
    """

    def __init__(
        self,
        suite: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        server: str | PathLike[str] | None = None,
        seed: int | None = None,
        filters: Filters | None = None,
        **settings: Any,
    ) -> None:
        given = suite is not None or server is not None or settings
        if url is not None and given:
            raise TypeError(
                "`suite`, `server` and settings are for a server that is started here; the one at `url` runs"
            )
        suites = [suite or "starter"] if suite is None or isinstance(suite, (str, PathLike)) else [*suite]
        if url is not None or (not given and URL_VARIABLE in os.environ):
            self._decathlon = Decathlon(url, token)
        elif server is not None:
            self._decathlon = Decathlon.at_endpoint(
                ChildEndpoint(server, list(map(os.fspath, suites)), settings)
            )
        else:
            self._decathlon = Decathlon.embedded(suites, **settings)
        self._filters: Filters = filters or {}
        self._random = random.Random(seed)
        self._tasks: tuple[Task, ...] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            decathlon = await stack.enter_async_context(self._decathlon)
            self._tasks = tuple(await decathlon.tasks(**self._filters))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks = None
        await self._stack.__aexit__(kind, error, trace)

    @property
    def client(self) -> Decathlon:
        """The connection, for all else: batches, groups, lockstep, branches, tools without an episode."""
        return self._decathlon

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks as listed on entering, with tasks that cannot run here (`Task.missing`)."""
        if self._tasks is None:
            raise RuntimeError("this environment is not open: use it in `async with`")
        return self._tasks

    def sample(
        self,
        split: str | None = None,
        *,
        min_pass_rate: float | None = None,
        max_pass_rate: float | None = None,
    ) -> Task:
        """Draw a task that can run here. Opens no sandbox and asks no server.

        `split`: `train` or `test`. `min_pass_rate` and `max_pass_rate`, from 0 to 1, are limits of its
        difficulty as they were on entering, where the server has results; a task without results meets none.
        `client.sample` asks for the pass rates of now. Raises ValueError if there is no such task; the
        message has the splits, or says what keeps the tasks from running.
        """
        in_split = [task for task in self.tasks if split is None or split in task.splits]
        if not in_split:
            known = sorted({name for task in self.tasks for name in task.splits})
            raise ValueError(f"no task is in the split {split!r}; splits: {', '.join(known) or 'none'}")
        runnable = [task for task in in_split if task.runnable]
        if not runnable:
            task = in_split[0]
            raise ValueError(
                f"none of {len(in_split)} tasks can run here; {task.id}: {'; '.join(task.missing)}"
            )
        low, high = min_pass_rate or 0.0, 1.0 if max_pass_rate is None else max_pass_rate
        if min_pass_rate is None and max_pass_rate is None:
            return self._random.choice(runnable)
        rated = [task for task in runnable if task.pass_rate is not None]
        fitting = [task for task in rated if low <= (task.pass_rate or 0.0) <= high]
        if not fitting:
            raise ValueError(
                f"no task has a pass rate from {low:g} to {high:g}; {len(rated)} of {len(runnable)} had "
                "one when this environment was entered; `await env.client.sample(...)` asks for those of now"
            )
        return self._random.choice(fitting)

    def episode(
        self, task: str | Task | None = None, **options: Unpack[OpeningOptions]
    ) -> AbstractAsyncContextManager[Episode]:
        """Open an attempt at a task, by default drawn by `sample`, and wait until it is ready.

        On exit its sandbox is removed. Takes and raises what `Decathlon.episode` does.
        """
        return self._decathlon.episode(task if task is not None else self.sample(), **options)
