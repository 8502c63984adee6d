"""How a command runs: in this process on an event loop, or on a server that runs elsewhere."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from decathlon_mcp.settings import Settings


def names_server(url: str | None, settings: Settings) -> bool:
    """Whether to connect to a server: at `url`, or at `DECATHLON_URL` if no suite is named."""
    return url is not None or ("DECATHLON_URL" in os.environ and "suite" not in settings.model_fields_set)


def run_async(command: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    """Run a command in an event loop; uvloop if it is installed."""
    try:
        import uvloop as _  # noqa: F401
    except ModuleNotFoundError:
        return anyio.run(command, *arguments)
    return anyio.run(command, *arguments, backend_options={"use_uvloop": True})
