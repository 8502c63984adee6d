"""Players that raise, each at a line of its own. pytest rewrites the assertions of tests, but not these."""

from __future__ import annotations

import json
from typing import Any

from decathlon_client import Episode


async def missing_key(e: Episode) -> None:
    message: dict[str, Any] = {"content": "no call"}
    await e.act(message["tool_calls"])


async def assertion(e: Episode) -> None:
    assert len(e.tools) > 1000


async def library(e: Episode) -> None:
    await e.act(json.loads("no JSON"))


async def unknown_tool(e: Episode) -> None:
    await e.call("probe__no_such_tool")
