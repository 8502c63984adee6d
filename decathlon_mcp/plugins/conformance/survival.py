"""Checks of sandboxes that survive their server."""

from __future__ import annotations

import asyncio

import anyio

from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.plugins.conformance.archives import download, file_entry, pack
from decathlon_mcp.plugins.conformance.probe import Probe, raises, receive_all
from decathlon_mcp.plugins.conformance.registry import registered
from decathlon_mcp.plugins.conformance.target import PROBE_COMMAND, ProviderUnderTest
from decathlon_mcp.sandboxes.base import SandboxSpec


@registered(seconds=60, survival=True)
async def sandbox_is_reattached(target: ProviderUnderTest) -> None:
    """Another provider continues the sandbox of a killed server: its process, files, exit and removal."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "none")
    async with target.provider.reattach(target.former_owner, spec) as sandbox:
        assert sandbox.spec is spec
        assert sandbox.root == target.provider.root(spec)
        assert await sandbox.is_running()
        assert await sandbox.cause_of_end() is None
        with raises(BadRequestError, "already"):
            async with target.provider.reattach(target.former_owner, spec):
                pass
        probe = Probe(sandbox, reopened=True)
        await sandbox.put(sandbox.root, pack(file_entry("in/file", b"old", mode=0o600)))
        await probe.write(sandbox.root / "in" / "file", "new")
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
        assert listing["in/file"][1] == b"new"
        await sandbox.stream.aclose()
        await sandbox.reopen()
        await probe.ping()
        await sandbox.stream.send(b'{"exit": 3}\n')
        await receive_all(sandbox)
        assert await sandbox.cause_of_end() in ("exit code 3", None)
        assert not await sandbox.is_running()
        with raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@registered(seconds=60, survival=True)
async def sandbox_that_was_reattached_is_removed_at_its_exit(target: ProviderUnderTest) -> None:
    """A running sandbox of a killed server is removed with all its processes when it is exited."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "none")
    async with target.provider.reattach(target.former_owner, spec) as sandbox:
        await Probe(sandbox, reopened=True).ping()
    await target.assert_nothing_left()


@registered(seconds=60, survival=True)
async def paused_sandbox_is_reattached_paused(target: ProviderUnderTest) -> None:
    """Files of a paused sandbox of a killed server can be copied; its stream has ended."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "pause")
    async with target.provider.reattach(target.former_owner, spec) as sandbox:
        assert not await sandbox.is_running()
        assert await receive_all(sandbox) == b""
        await download(sandbox, sandbox.root, target.scratch / "out.tar")
        await sandbox.pause()
        with raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@registered(seconds=60, survival=True)
async def ended_sandbox_is_not_reattached(target: ProviderUnderTest) -> None:
    """A sandbox whose first process ended meanwhile is lost, and nothing of it is left."""
    spec = target.new_spec(("python3", "-c", "") if target.runs_commands else PROBE_COMMAND, survives=True)
    await target.leave_behind([spec], "end")
    with raises(SandboxLostError):
        async with target.provider.reattach(target.former_owner, spec):
            pass
    await target.assert_nothing_left()


@registered(seconds=60, survival=True)
async def unknown_sandbox_is_not_reattached(target: ProviderUnderTest) -> None:
    """A sandbox that does not exist or belongs to another owner cannot be reattached, and is not touched."""
    with raises(SandboxLostError):
        async with target.provider.reattach(target.former_owner, target.new_spec(survives=True)):
            pass
    spec = target.new_spec(survives=True)
    async with target.create_second() as second, second.open(spec) as sandbox:
        with raises(SandboxLostError):
            async with target.provider.reattach(target.former_owner, spec):
                pass
        await Probe(sandbox).ping()
    await target.assert_nothing_left()


@registered(seconds=60)
async def sandbox_that_does_not_survive_ends_with_its_server(target: ProviderUnderTest) -> None:
    """The first process of a killed server ends by itself, and what is left of it cannot be reattached."""
    spec = target.new_spec()
    await target.leave_behind([spec], "none")
    with anyio.move_on_after(1):
        await target.wait_until_nothing_left()
    with raises(SandboxLostError):
        async with target.provider.reattach(target.former_owner, spec):
            pass
    await target.assert_nothing_left()


@registered(seconds=60, survival=True)
async def sweep_keeps_the_sandboxes_that_it_is_given(target: ProviderUnderTest) -> None:
    """`sweep` spares sandboxes with a name in `keep` and those that this provider has reattached."""
    removed, kept, reattached = (target.new_spec(survives=True) for _ in range(3))
    await target.leave_behind([removed, kept, reattached], "none")
    async with target.provider.reattach(target.former_owner, reattached) as sandbox:
        assert await target.provider.sweep(target.former_owner, keep={kept.name}) == 1
        assert await target.provider.sweep(target.former_owner, keep=[kept.name]) == 0
        await Probe(sandbox, reopened=True).ping()
        async with target.provider.reattach(target.former_owner, kept) as sandbox:
            await Probe(sandbox, reopened=True).ping()
    await target.assert_nothing_left()


@registered(seconds=120, survival=True)
async def cancelled_reattaching_leaves_nothing(target: ProviderUnderTest) -> None:
    """A reattachment that is cancelled at any moment, by a cancel scope or a task, leaves nothing behind."""
    steps = 12
    specs = [target.new_spec(survives=True) for _ in range(2 * steps)]
    await target.leave_behind(specs, "none")
    finished = 0

    async def reattach(spec: SandboxSpec) -> None:
        nonlocal finished
        async with target.provider.reattach(target.former_owner, spec) as sandbox:
            await Probe(sandbox, reopened=True).ping()
        finished += 1

    for step in range(steps):
        seconds = step * 0.003
        with anyio.move_on_after(seconds):
            await reattach(specs.pop())
        # This cancellation ignores anyio's shields.
        task = asyncio.create_task(reattach(specs.pop()))
        await asyncio.sleep(0)  # a task that is cancelled before its first step never begins
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.wait([task])
    while finished < 2:
        await target.leave_behind([spec := target.new_spec(survives=True)], "none")
        await reattach(spec)
    await target.wait_until_nothing_left()
