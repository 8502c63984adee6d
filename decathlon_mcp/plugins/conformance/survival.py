"""Checks of sandboxes that outlive their streams and their server."""

from __future__ import annotations

import asyncio
import json

import anyio

from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.plugins.conformance.target import (
    OUTPUT_BYTES,
    PROBE_COMMAND,
    Probe,
    ProviderUnderTest,
    download,
    file_entry,
    pack,
    raises,
    receive_all,
    receive_line,
    registered,
)
from decathlon_mcp.sandboxes.base import Sandbox, SandboxSpec


@registered("survival")
async def reopened_stream_reaches_the_same_first_process(target: ProviderUnderTest) -> None:
    """A sandbox that survives goes on when its stream is closed, and new streams reach its first process."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await Probe(sandbox).ping()
        for _ in range(3):
            closed = sandbox.stream
            await closed.aclose()
            await sandbox.reopen()
            assert sandbox.stream is not closed
            await Probe(sandbox, reopened=True).ping()
        assert await sandbox.is_running()
        assert await sandbox.cause_of_end() is None
    await target.assert_nothing_left()


@registered("survival")
async def stream_cut_inside_a_message_is_reopened(target: ProviderUnderTest) -> None:
    """Messages that were cut in either direction do not prevent what is sent after a line feed."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        for cut in (b'{"echo', b'{"echo": 1}\n{"echo": 2}\n{"ec'):
            await sandbox.stream.send(cut)
            await sandbox.stream.aclose()
            await sandbox.reopen()
            await Probe(sandbox, reopened=True).ping()


@registered("survival")
async def stream_with_unread_answers_is_reopened(target: ProviderUnderTest) -> None:
    """What was sent is done though nobody receives the answer, and the next stream works."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        request = {"write": str(sandbox.root / "file"), "text": "done"}
        await sandbox.stream.send(json.dumps(request).encode() + b"\n")
        await _wait_for_file(target, sandbox, "file")
        await sandbox.stream.aclose()
        await sandbox.reopen()
        await Probe(sandbox, reopened=True).ping()


async def _wait_for_file(target: ProviderUnderTest, sandbox: Sandbox, name: str) -> None:
    while name not in await download(sandbox, sandbox.root, target.scratch / "out.tar"):  # noqa: ASYNC110
        await anyio.sleep(0.05)


@registered("survival")
async def end_of_input_does_not_end_a_sandbox_that_survives(target: ProviderUnderTest) -> None:
    """After `send_eof` the first process goes on, and the stream can be reopened."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await Probe(sandbox).ping()
        await sandbox.stream.send_eof()
        await sandbox.reopen()
        await Probe(sandbox, reopened=True).ping()


@registered("survival")
async def stream_of_an_ended_sandbox_is_not_reopened(target: ProviderUnderTest) -> None:
    """When the first process has ended by itself, `reopen` raises SandboxLostError."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await Probe(sandbox).ping()
        await sandbox.stream.send(b'{"exit": 3}\n')
        assert await receive_all(sandbox) == b""
        with raises(SandboxLostError):
            await sandbox.reopen()
        assert await sandbox.cause_of_end() == "exit code 3"
        assert not await sandbox.is_running()
    await target.assert_nothing_left()


@registered("survival")
async def stream_of_a_paused_sandbox_is_not_reopened(target: ProviderUnderTest) -> None:
    """`reopen` of a paused sandbox raises SandboxLostError."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await sandbox.pause()
        with raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@registered("commands", "survival")
async def output_without_a_stream_does_not_stop_the_first_process(target: ProviderUnderTest) -> None:
    """32 KiB to each of stdout and stderr that nobody receives do not keep the first process waiting."""
    script = f"""
import sys, time
print("ready", flush=True)
time.sleep(0.5)
sys.stdout.write("o" * {OUTPUT_BYTES - 1} + "\\n")
sys.stderr.write("e" * {OUTPUT_BYTES})
open("done", "w").close()
print("answer", input())
input()
"""
    async with target.provider.open(target.python_spec(script, survives=True)) as sandbox:
        assert await receive_line(sandbox) == "ready"
        await sandbox.stream.aclose()
        await _wait_for_file(target, sandbox, "done")
        await sandbox.reopen()
        await sandbox.stream.send(b"1\n")
        received = b""
        while not received.endswith(b"answer 1\n"):
            received += await sandbox.stream.receive()


@registered("survival", seconds=60)
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


@registered("survival", seconds=60)
async def sandbox_that_was_reattached_is_removed_at_its_exit(target: ProviderUnderTest) -> None:
    """A running sandbox of a killed server is removed with all its processes when it is exited."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "none")
    async with target.provider.reattach(target.former_owner, spec) as sandbox:
        await Probe(sandbox, reopened=True).ping()
    await target.assert_nothing_left()


@registered("survival", seconds=60)
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


@registered("survival", seconds=60)
async def ended_sandbox_is_not_reattached(target: ProviderUnderTest) -> None:
    """A sandbox whose first process ended meanwhile is lost, and nothing of it is left."""
    spec = target.new_spec(("python3", "-c", "") if target.runs_commands else PROBE_COMMAND, survives=True)
    await target.leave_behind([spec], "end")
    with raises(SandboxLostError):
        async with target.provider.reattach(target.former_owner, spec):
            pass
    await target.assert_nothing_left()


@registered("survival", seconds=60)
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


@registered("survival", seconds=60)
async def sweep_keeps_the_sandboxes_that_it_is_given(target: ProviderUnderTest) -> None:
    """`sweep` spares sandboxes with a name in `keep`, and sandboxes that this provider has reattached."""
    removed, kept, reattached = (target.new_spec(survives=True) for _ in range(3))
    await target.leave_behind([removed, kept, reattached], "none")
    async with target.provider.reattach(target.former_owner, reattached) as sandbox:
        assert await target.provider.sweep(target.former_owner, keep={kept.name}) == 1
        assert await target.provider.sweep(target.former_owner, keep=[kept.name]) == 0
        await Probe(sandbox, reopened=True).ping()
        async with target.provider.reattach(target.former_owner, kept) as sandbox:
            await Probe(sandbox, reopened=True).ping()
    await target.assert_nothing_left()


@registered("survival", seconds=120)
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
