"""Calls of tools that wait for their reply, without an episode."""

from __future__ import annotations

import asyncio
from typing import Any

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.tools.offered import ToolRoute
from decathlon_mcp.episodes.tools.tool_session import ToolSession
from decathlon_mcp.errors import DriverError
from decathlon_mcp.types import JsonObject


async def call_server(
    driver: DriverClient, server: str, params: JsonObject, *, truncation: Any = None
) -> Reply:
    """Call a tool of a server, and return its reply. Raises the error that the call failed with."""
    settled = asyncio.Future[Any]()
    number = driver.new_request_id()
    driver.call(
        number,
        server,
        params,
        truncation=truncation,
        on_outcome=settled.set_result,
        on_notification=lambda notification: None,
    )
    try:
        outcome = await settled
    finally:
        driver.cancel(number)
    if isinstance(outcome, Reply):
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
