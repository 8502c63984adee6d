"""Background tasks that run as long as a body and are cancelled with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """A task group that is cancelled when the body ends; the body's own exception leaves unwrapped."""
    # A plain task group would wrap the body's exception in a group, which no caller's `except` matches.
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
