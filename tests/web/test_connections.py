"""Connections of the recording proxy, without mitmproxy."""

from __future__ import annotations

import asyncio
from typing import cast

import anyio
import pytest

from decathlon_mcp.plugins.web.connections import Client, LimitedReader, Sandbox
from decathlon_mcp.plugins.web.sandbox_session import Session

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_site", [True, False])
async def test_a_connection_that_the_kernel_gave_up_ends(is_site: bool) -> None:
    """Its error is a TimeoutError (ETIMEDOUT), and comes again at once for each further look."""
    broken = asyncio.StreamReader()
    broken.set_exception(TimeoutError("connection timed out"))
    client = Client(Sandbox(cast("Session", None), request_seconds=60), lambda: 0)
    with anyio.fail_after(5), pytest.raises(TimeoutError, match="connection timed out"):
        await LimitedReader(client, broken, is_site).read(1)
