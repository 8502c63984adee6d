"""Program for tests to kill: opens sandboxes and does one last thing to each.

Prints "opening" before, and "ready" after that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path, PurePosixPath

import anyio

from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.conformance import LastStep
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.local.provider import LocalProvider


async def main(owner: str, folder: str, specs: Sequence[dict[str, object]], last_step: LastStep) -> None:
    docker = any(spec["image"] for spec in specs)
    provider: Provider = DockerProvider(owner) if docker else LocalProvider(owner, Path(folder))
    async with provider, AsyncExitStack() as stack:
        report("opening")
        for spec in specs:
            await act(await stack.enter_async_context(provider.open(parse_spec(spec))), last_step)
        report("ready")
        await anyio.sleep_forever()


def report(state: str) -> None:
    sys.stdout.write(f"{state}\n")
    sys.stdout.flush()


async def act(sandbox: Sandbox, last_step: LastStep) -> None:
    if last_step == "pause":
        await sandbox.pause()
    elif last_step == "end":
        with suppress(anyio.EndOfStream):
            while True:
                await sandbox.stream.receive()


def spec_arguments(spec: SandboxSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "command": spec.command,
        "root": str(spec.root),
        "image": spec.image,
        "survives": spec.survives,
    }


def parse_spec(arguments: dict[str, object]) -> SandboxSpec:
    values = arguments | {"root": PurePosixPath(str(arguments["root"])), "limits": Limits(memory_mib=512)}
    return SandboxSpec(**values)  # type: ignore[arg-type]


if __name__ == "__main__":
    anyio.run(lambda: main(**json.loads(sys.argv[1])))
