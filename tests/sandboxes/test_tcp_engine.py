"""A Docker engine that is reached over TCP. Needs none."""

from __future__ import annotations

import socket

import anyio
import pytest

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.plugins.docker.engine import Engine


@pytest.mark.anyio
async def test_engine_over_tcp_that_is_gone_is_waited_for() -> None:
    gone = ProviderUnavailableError("it is gone")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        engine = Engine(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ProviderUnavailableError, match="it is gone"):
            await engine.wait_for_restart(gone, anyio.current_time() + 0.5)
        listener.listen()
        await engine.wait_for_restart(gone, anyio.current_time() + 5)
