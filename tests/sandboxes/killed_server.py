"""Program for tests to kill: opens sandboxes and does one last thing to each.

Prints "opening" before, and "ready" after that. With `survival` in its arguments, which are pickled, it
attaches to their drivers, which then wait so many seconds for another server.
"""

from __future__ import annotations

import pickle
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from decathlon_mcp.driver.client import connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.plugins.conformance.conformance import LastStep
from decathlon_mcp.plugins.gvisor import sandbox as gvisor_sandbox
from decathlon_mcp.sandboxes.base import SandboxSpec


async def main(
    create: Callable[[], Any],
    specs: Sequence[SandboxSpec],
    last_step: LastStep,
    saved: Path,
    survival: int | None,
) -> None:
    provider = create()
    async with provider, AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        print("opening", flush=True)  # noqa: T201
        for spec in specs:
            if last_step == "save":
                ready = anyio.Event()
                tasks.start_soon(save_over_and_over, provider, spec, saved, ready)
                await ready.wait()
                await anyio.sleep(secrets.randbelow(1000) / 1000)
                continue
            if last_step == "copy":
                async with provider.open(spec) as sandbox:
                    snapshot = await sandbox.snapshot(saved)
                await stack.enter_async_context(provider.open(spec, snapshot=snapshot))
                continue
            sandbox = await stack.enter_async_context(provider.open(spec))
            if survival is not None:
                gvisor_sandbox.PAUSED_SECONDS = survival
                connection = connect(sandbox, reconnect=ReconnectPolicy(survival))
                await (await stack.enter_async_context(connection)).ping()
            if last_step == "pause":
                await sandbox.pause()
            elif last_step == "end":
                with suppress(anyio.EndOfStream):
                    while True:
                        await sandbox.stream.receive()
        print("ready", flush=True)  # noqa: T201
        await anyio.sleep_forever()


async def save_over_and_over(provider: Any, spec: SandboxSpec, folder: Path, saved: anyio.Event) -> None:
    async with provider.open(spec) as sandbox:
        for number in range(1000):
            snapshot = await sandbox.snapshot(folder.with_name(f"{number}-{folder.name}"))
            saved.set()
            async with provider.open(replace(spec, name=f"{spec.name}-{number}"), snapshot=snapshot):
                pass


if __name__ == "__main__":
    anyio.run(main, *pickle.loads(bytes.fromhex(sys.argv[1])))
