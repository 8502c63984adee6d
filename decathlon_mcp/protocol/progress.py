"""Progress notifications of one request: this server's own, and those of the task's server, in one sequence.

The progress on one token must not decrease. A request that waits for its episode and then for a tool has
notifications of both, and a request that is continued by another server process starts to wait again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from decathlon_mcp.background import background_tasks
from decathlon_mcp.protocol.context import request_context_of
from decathlon_mcp.protocol.envelopes import PROGRESS_TOKEN
from decathlon_mcp.protocol.results import is_sessionless
from decathlon_mcp.protocol.sdk import Context, send_notification
from decathlon_mcp.types import JsonObject, as_object

PROGRESS_SECONDS = 5.0
"""Time between two progress notifications while a client waits."""
WAITING_UNIT = 1e-6
"""Progress per second of a wait before a tool's call: below anything that a tool reports, except 0."""


class Progress:
    """The progress of one request, if its client asked for it."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._token: Any = (as_object((ctx.params or {}).get("_meta")) or {}).get(PROGRESS_TOKEN)
        self._last = 0.0

    async def relay(self, params: JsonObject) -> None:
        """Pass on a notification of the task's server, under the client's own token."""
        if self._token is None or not request_context_of(self._ctx).can_stream:
            return
        progress = max(params["progress"], self._last)
        await self._send({**params, "progress": progress, PROGRESS_TOKEN: self._token})

    @asynccontextmanager
    async def reporting(
        self,
        message: Callable[[], str],
        *,
        since: Callable[[], float],
        unit: float = 1.0,
        at_once: bool = False,
    ) -> AsyncGenerator[None]:
        """Send progress every `PROGRESS_SECONDS` while the context is open.

        The progress is the number of seconds since `since`, a time of the wall clock, times `unit`. It is a
        time that another server process knows too. `at_once`: also at the beginning.
        """
        can_stream = request_context_of(self._ctx).can_stream or is_sessionless(self._ctx.protocol_version)
        if self._token is None or not can_stream:
            yield
            return

        async def send_repeatedly() -> None:
            if not at_once:
                await anyio.sleep(PROGRESS_SECONDS)
            while True:
                progress = max(round(time.time() - since()), 0) * unit
                text = message()
                await self._send(
                    {PROGRESS_TOKEN: self._token, "progress": max(progress, self._last), "message": text}
                )
                await anyio.sleep(PROGRESS_SECONDS)

        async with background_tasks() as tasks:
            tasks.start_soon(send_repeatedly)
            yield

    async def _send(self, params: JsonObject) -> None:
        self._last = params["progress"]
        await send_notification(self._ctx, "notifications/progress", params, with_reply=True)
