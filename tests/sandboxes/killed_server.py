"""Program for tests to kill: opens sandboxes and does one last thing to each.

Prints "opening" before, and "ready" after that. With `survival` in its arguments, it attaches to their
drivers, which then wait so many seconds for another server.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup

from decathlon_mcp.driver.client import connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.plugins.conformance.conformance import LastStep
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.plugins.gvisor import sandbox as gvisor_sandbox
from decathlon_mcp.plugins.gvisor.sandbox import GvisorSandbox
from decathlon_mcp.sandboxes import plugins
from decathlon_mcp.sandboxes.base import Limits, Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.capabilities import SnapshotProvider, snapshots_of
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.settings import read_settings


async def main(
    owner: str,
    folder: str,
    specs: Sequence[dict[str, object]],
    last_step: LastStep,
    host: dict[str, Any] | None,
    plugin: tuple[str, Sequence[str]] | None,
    survival: int | None = None,
) -> None:
    if host is not None:
        provider = host_provider(owner, Path(folder), **host)
    elif plugin is None:
        provider = DockerProvider(owner)
    else:
        name, options = plugin
        settings = read_settings({"provider": name, "provider_option": options, "state": folder})
        provider = plugins.create_provider(name, owner, settings)
    saved = Path(folder).with_name("saved-by-server")
    async with provider, AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        report("opening")
        for arguments in specs:
            spec = parse_spec(arguments)
            if last_step == "copy":
                await save_and_open(snapshots_of(provider), spec, saved, stack)
                continue
            if last_step == "save":
                await save_over_and_over(snapshots_of(provider), spec, saved, tasks)
                continue
            sandbox = await stack.enter_async_context(provider.open(spec))
            if survival is not None:
                gvisor_sandbox.PAUSED_SECONDS = survival
                connection = connect(sandbox, reconnect=ReconnectPolicy(survival))
                await (await stack.enter_async_context(connection)).ping()
            await act(sandbox, last_step)
        report("ready")
        await anyio.sleep_forever()


async def save_and_open(
    provider: SnapshotProvider | None, spec: SandboxSpec, folder: Path, stack: AsyncExitStack
) -> None:
    assert provider is not None
    async with provider.open(spec) as sandbox:
        snapshot = await sandbox.snapshot(folder)
    await stack.enter_async_context(provider.open(spec, snapshot=snapshot))


async def save_over_and_over(
    provider: SnapshotProvider | None, spec: SandboxSpec, folder: Path, tasks: TaskGroup
) -> None:
    """Returns at some moment after the first time."""
    assert provider is not None
    saved = anyio.Event()

    async def repeat() -> None:
        async with provider.open(spec) as sandbox:
            for number in range(1000):
                snapshot = await sandbox.snapshot(folder.with_name(f"{number}-{folder.name}"))
                saved.set()
                async with provider.open(replace(spec, name=f"{spec.name}-{number}"), snapshot=snapshot):
                    pass

    tasks.start_soon(repeat)
    await saved.wait()
    await anyio.sleep(secrets.randbelow(1000) / 1000)


def host_provider(
    owner: str,
    folder: Path,
    isolation: Literal["namespaces", "none"] = "namespaces",
    kernel: str | None = None,
) -> HostProvider:
    kind = NamespaceSandbox if kernel is None else GvisorSandbox
    return HostProvider(owner, folder, isolation=isolation, kernel=kind)


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
        "network": spec.network,
        "survives": spec.survives,
    }


def parse_spec(arguments: dict[str, object]) -> SandboxSpec:
    values = arguments | {"root": PurePosixPath(str(arguments["root"])), "limits": Limits(memory_mib=512)}
    return SandboxSpec(**values)  # type: ignore[arg-type]


if __name__ == "__main__":
    anyio.run(lambda: main(**json.loads(sys.argv[1])))
