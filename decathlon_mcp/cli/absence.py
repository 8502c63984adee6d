"""A line on stderr when the server of a command does not answer, and when it answers again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from decathlon_client.address import server_url
from decathlon_client.background import background_tasks
from decathlon_client.sdk import http_client, httpx

from decathlon_mcp.cli.usage import report

QUIET_SECONDS = 3.0
"""Pause between two questions. Most commands end before the first one."""
ANSWER_SECONDS = 2.0
"""How long a server that works takes to answer `/healthz` at most; with the pause, 5 s until the line."""
OF_A_PROXY = frozenset({502, 504})
"""Statuses with which a proxy answers for a server that is gone."""


@asynccontextmanager
async def reporting_absence(url: str | None) -> AsyncGenerator[None]:
    """Ask the server at `url` in the background whether it works, as long as the body runs.

    The body itself goes on: a request may take minutes on a server that works, and one whose connection was
    lost is sent again. None: see `server_url`. Raises ValueError for a URL that cannot be right.
    """
    root = server_url(url, is_root=True).rstrip("/").removesuffix("/mcp")
    async with background_tasks() as tasks:
        tasks.start_soon(_report_absence, root)
        yield


async def _report_absence(root: str) -> None:
    is_away = False
    async with http_client({}) as client:
        while True:
            await anyio.sleep(QUIET_SECONDS)
            if await _answers(client, root) is not is_away:
                continue
            is_away = not is_away
            what = "does not answer; this command waits for it" if is_away else "answers again"
            report(f"the server at {root} {what}")


async def _answers(client: httpx.AsyncClient, root: str) -> bool:
    with anyio.move_on_after(ANSWER_SECONDS):
        try:
            # One byte of any answer is enough; its body is not read.
            async with client.stream("GET", f"{root}/healthz", follow_redirects=False) as response:
                return response.status_code not in OF_A_PROXY
        except httpx.HTTPError:
            return False
    return False
