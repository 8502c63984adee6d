"""Calls of tools that wait for their reply, without an episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.driver_messages import Notification
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.episodes.tools.tool_session import ToolSession
from decathlon_mcp.errors import DecathlonError, DriverError
from decathlon_mcp.types import JsonObject


def ignore(*arguments: object) -> None:
    pass


async def call_server(
    driver: DriverClient,
    server: str,
    params: JsonObject,
    *,
    request_id: int | None = None,
    on_outcome: Callable[[Any], object] = ignore,
    on_notification: Callable[[Notification], object] = ignore,
    truncation: Any = None,
) -> Reply:
    """Call a tool of a server, and return its reply. `on_outcome` is called where that is read.

    Raises the error that the call failed with.
    """
    ended, outcomes = anyio.Event(), list[Reply | DecathlonError | None]()

    def end(outcome: Reply | DecathlonError | None) -> None:
        on_outcome(outcome)
        outcomes.append(outcome)
        ended.set()

    number = driver.new_request_id() if request_id is None else request_id
    driver.call(
        number, server, params, truncation=truncation, on_outcome=end, on_notification=on_notification
    )
    try:
        await ended.wait()
    finally:
        driver.cancel(number)
    if isinstance(outcome := outcomes[0], Reply):
        return outcome
    raise outcome or await driver.closed_error()


async def call_tool(session: ToolSession, route: ToolRoute, params: CallParams) -> Reply:
    """Call a tool of an episode, and start its server before."""
    await session.starts.ensure(route.server)
    truncation = session.truncation_for(route)
    try:
        return await call_server(
            session.driver, route.server, params.for_tool(route.tool), truncation=truncation
        )
    except DriverError as error:
        session.starts.note_failure(route.server, error)
        raise
