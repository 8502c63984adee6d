"""Tasks that own something for as long as a body runs, and end with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """For the tasks that own connections and episodes. The body's own error leaves as itself, in no group."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
