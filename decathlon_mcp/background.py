"""Tasks beside a body of code."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """A task group that ends with the body. The body's own exception leaves as itself, not in a group."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
