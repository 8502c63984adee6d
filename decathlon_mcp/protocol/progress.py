"""Progress notifications of one request: this server's own, and those of the task's server, in one sequence.

The progress on one token must not decrease. A request that waits for its episode and then for a tool has
notifications of both, and a request that is continued by another server process starts to wait again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

from decathlon_mcp.background import background_tasks
from decathlon_mcp.protocol.envelopes import PROGRESS_TOKEN
from decathlon_mcp.protocol.tool_requests import ToolRequest
from decathlon_mcp.types import JsonObject

PROGRESS_SECONDS = 5.0
"""Time between two progress notifications while a client waits."""
WAITING_UNIT = 1e-6
"""Progress per second of a wait before a tool's call: below anything that a tool reports, except 0."""


def _always() -> bool:
    return True


class Progress:
    """The progress of one request, if its client asked for it."""

    def __init__(self, request: ToolRequest) -> None:
        self._request = request
        self._last = 0.0

    @property
    def _is_wanted(self) -> bool:
        return self._request.progress_token is not None and self._request.can_stream

    async def relay(self, params: JsonObject) -> None:
        """Pass on a notification of the task's server, under the client's own token."""
        if self._is_wanted:
            await self._send({**params, "progress": max(params["progress"], self._last)})

    @asynccontextmanager
    async def reporting(
        self,
        message: Callable[[], str],
        *,
        since: Callable[[], float],
        unit: float = 1.0,
        at_once: bool = False,
        while_: Callable[[], bool] = _always,
    ) -> AsyncGenerator[None]:
        """Send progress every `PROGRESS_SECONDS` while the context is open and `while_` holds.

        The progress is the number of seconds since `since`, a time of the wall clock, times `unit`. It is a
        time that another server process knows too. `at_once`: also at the beginning.
        """
        if not self._is_wanted:
            yield
            return

        async def send_repeatedly() -> None:
            if not at_once:
                await anyio.sleep(PROGRESS_SECONDS)
            while while_():
                progress = max(round(time.time() - since()), 0) * unit
                await self._send({"progress": max(progress, self._last), "message": message()})
                await anyio.sleep(PROGRESS_SECONDS)

        async with background_tasks() as tasks:
            tasks.start_soon(send_repeatedly)
            yield

    async def _send(self, params: JsonObject) -> None:
        self._last = params["progress"]
        params = {**params, PROGRESS_TOKEN: self._request.progress_token}
        await self._request.notify("notifications/progress", params)
