"""Program for tests to kill: opens three sandboxes, prints "ready", and waits for SIGTERM."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path, PurePosixPath

import anyio

from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.base import Provider, SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider


async def main(owner: str, image: str | None, folder: str) -> None:
    provider: Provider = (
        DockerProvider(owner) if image else HostProvider(owner, Path(folder), isolation="none")
    )
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(provider)
            for number in range(3):
                spec = SandboxSpec(f"{owner}-{number}", BOOT_COMMAND, PurePosixPath("/episode"), image)
                sandbox = await stack.enter_async_context(provider.open(spec))
                await stack.enter_async_context(connect(sandbox))
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            async for _ in signals:
                return


if __name__ == "__main__":
    anyio.run(lambda: main(**json.loads(sys.argv[1])))
