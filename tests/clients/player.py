"""Plays a task in an environment with only the client; prints the reward, then kills the server."""

from __future__ import annotations

import os
import signal
import sys

import anyio
from decathlon_client import CallTimeoutError, ConnectionLostError, Decathlon


async def play(url: str) -> None:
    reports: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reports.append(progress)

    async with Decathlon(url) as d:
        async with d.episode("find-answer") as e:
            await e.call("probe__count", {"to": 3, "pause": 0.01}, on_progress=on_progress)
            assert reports == [1, 2, 3], reports
            try:
                await e.call("probe__sleep", {"seconds": 100, "note": "late"}, timeout=0.3)
                raise AssertionError("it cannot have slept so long")
            except CallTimeoutError:
                pass
            wait = {"command": "until [ -s cancelled.txt ]; do sleep 0.02; done"}
            await e.call("probe__shell", wait, timeout=20)
            await e.call("probe__write", {"path": "answer.txt", "text": "42"})
            await e.claim_done("it is 42")
            sys.stdout.write(f"reward {(await e.evaluate()).reward}\n")


async def outlive(url: str, server: int) -> None:
    """A call fails when its server is killed and does not come back."""

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        os.kill(server, signal.SIGKILL)

    async with Decathlon(url, resend_seconds=1) as d, d.episode("find-answer") as e:
        with anyio.fail_after(20):
            try:
                await e.call("probe__count", {"to": 2, "pause": 100}, on_progress=on_progress)
            except ConnectionLostError:
                return
    raise AssertionError("a killed server cannot have answered")


async def main(url: str, server: int) -> None:
    await play(url)
    await outlive(url, server)


anyio.run(main, sys.argv[1], int(sys.argv[2]))
