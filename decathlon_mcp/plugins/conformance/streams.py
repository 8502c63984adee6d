"""Checks of streams that are reopened."""

from __future__ import annotations

import json

import anyio

from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.plugins.conformance.archives import download
from decathlon_mcp.plugins.conformance.probe import Probe, raises, receive_all, receive_line
from decathlon_mcp.plugins.conformance.registry import registered
from decathlon_mcp.plugins.conformance.target import OUTPUT_BYTES, ProviderUnderTest
from decathlon_mcp.sandboxes.base import Sandbox


@registered(survival=True)
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


@registered(survival=True)
async def stream_cut_inside_a_message_is_reopened(target: ProviderUnderTest) -> None:
    """Messages that were cut in either direction do not prevent what is sent after a line feed."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        for cut in (b'{"echo', b'{"echo": 1}\n{"echo": 2}\n{"ec'):
            await sandbox.stream.send(cut)
            await sandbox.stream.aclose()
            await sandbox.reopen()
            await Probe(sandbox, reopened=True).ping()


@registered(survival=True)
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


@registered(survival=True)
async def end_of_input_does_not_end_a_sandbox_that_survives(target: ProviderUnderTest) -> None:
    """After `send_eof` the first process goes on, and the stream can be reopened."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await Probe(sandbox).ping()
        await sandbox.stream.send_eof()
        await sandbox.reopen()
        await Probe(sandbox, reopened=True).ping()


@registered(survival=True)
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


@registered(survival=True)
async def stream_of_a_paused_sandbox_is_not_reopened(target: ProviderUnderTest) -> None:
    """`reopen` of a paused sandbox raises SandboxLostError."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await sandbox.pause()
        with raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@registered(commands=True, survival=True)
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
