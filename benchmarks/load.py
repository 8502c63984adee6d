"""Closed loops: sessions that make one call after another, all at the same time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
from anyio import CapacityLimiter

from benchmarks.wire_client import WireClient, wire_client

TEXT = "x" * 100
"""What every measured call says and hears."""
WARM_UP = 0.1
"""Part of the time before counting begins."""
POLL_SECONDS = 0.02
CONNECTING = 16
"""Sessions initialized at the same time; more would only wait in the server's listening socket."""


class Session(Protocol):
    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Load:
    """`cpu_seconds`: CPU time of the measured process per call; None without a process."""

    calls_per_second: float
    cpu_seconds: float | None


async def echo(session: Session, tool: str) -> None:
    """Make a call of 100 bytes and check its reply."""
    result = await session.request("tools/call", {"name": tool, "arguments": {"text": TEXT}})
    if result["content"] != [{"type": "text", "text": TEXT}]:
        raise RuntimeError(f"unexpected reply: {result}")


async def closed_loop(
    sessions: Sequence[Session],
    tool: str,
    *,
    seconds: float,
    cpu: Callable[[], float] | None = None,
) -> Load:
    """Call without pause in every session. `cpu`: reads the CPU time of the measured process."""
    count = 0
    over = False

    async def play(session: Session) -> None:
        nonlocal count
        while not over:
            await echo(session, tool)
            count += 1

    async def measure() -> Load:
        await anyio.sleep(seconds * WARM_UP)
        count_before, cpu_before, start = count, cpu() if cpu else 0.0, time.perf_counter()
        await anyio.sleep(seconds)
        while count == count_before:  # noqa: ASYNC110  (on a very busy machine)
            await anyio.sleep(POLL_SECONDS)
        calls, elapsed = count - count_before, time.perf_counter() - start
        cpu_used = cpu() - cpu_before if cpu else None
        return Load(calls / elapsed, None if cpu_used is None else cpu_used / calls)

    load = Load(0.0, None)
    async with anyio.create_task_group() as players:
        for session in sessions:
            players.start_soon(play, session)
        load = await measure()
        over = True
    return load


@asynccontextmanager
async def wire_sessions(urls: Sequence[str]) -> AsyncGenerator[list[WireClient]]:
    """A session with handshake at each address, in the order of the addresses. They are not ended."""
    async with AsyncExitStack() as stack:
        clients: list[WireClient] = [
            await stack.enter_async_context(wire_client(url, initialize=False, reconnects=True))
            for url in urls
        ]
        await for_each([client.initialize for client in clients], at_once=CONNECTING)
        yield clients


async def for_each(
    operations: Sequence[Callable[[], Awaitable[object]]], *, at_once: int | None = None
) -> None:
    """Run all operations concurrently, at most `at_once` of them at the same time."""
    limiter = CapacityLimiter(at_once or max(1, len(operations)))

    async def run(operation: Callable[[], Awaitable[object]]) -> None:
        async with limiter:
            await operation()

    async with anyio.create_task_group() as tasks:
        for operation in operations:
            tasks.start_soon(run, operation)
