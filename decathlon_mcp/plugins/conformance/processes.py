"""Checks of pausing, and of first processes of all kinds."""

from __future__ import annotations

import anyio

from decathlon_mcp.plugins.conformance.archives import download
from decathlon_mcp.plugins.conformance.probe import Probe, raises, receive_all, receive_line
from decathlon_mcp.plugins.conformance.registry import registered
from decathlon_mcp.plugins.conformance.target import ProviderUnderTest
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.sandboxes.streams import LOG_TAIL_BYTES


@registered()
async def paused_sandbox_does_nothing_and_its_files_can_be_read(target: ProviderUnderTest) -> None:
    """After `pause`, called twice, no process runs; `get` works, and the sandbox can be removed."""
    async with target.provider.open(target.new_spec()) as sandbox:
        probe, path = Probe(sandbox), sandbox.root / "a"
        await probe.write(path, "before")
        await sandbox.pause()
        await sandbox.pause()
        with anyio.move_on_after(0.3) as scope:
            await probe.write(path, "after")
        assert scope.cancelled_caught, "a paused process answered"
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
        assert listing["a"][1] == b"before"
    await target.assert_nothing_left()


@registered(seconds=120, commands=True)
async def bytes_survive_a_round_trip(target: ProviderUnderTest) -> None:
    """1 byte, 100 kB and 20 MB sent to a process that echoes them come back unchanged."""
    echo = "import os\nwhile data := os.read(0, 65536):\n    while data: data = data[os.write(1, data):]"
    for size in (1, 100_000, 20_000_000):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        spec = target.python_spec(echo)
        async with target.provider.open(spec) as sandbox, anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, sandbox, data)
            received = await receive_all(sandbox)
            assert received == data, f"{size} bytes came back as {len(received)} others"


async def _send_all(sandbox: Sandbox, data: bytes) -> None:
    await sandbox.stream.send(data)
    await sandbox.stream.send_eof()


@registered(commands=True)
async def output_before_exit_is_received(target: ProviderUnderTest) -> None:
    """Everything that a process wrote before it exited is received, then EndOfStream, repeatedly."""
    # A large write may be carried out in part (write(2)), and `print` does not go on with the rest.
    script = "import os\ndata = b'x' * 100_000 + b'\\n'\nwhile data: data = data[os.write(1, data):]"
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"x" * 100_000 + b"\n"
        with raises(anyio.EndOfStream):
            await sandbox.stream.receive()


@registered(commands=True)
async def end_of_stderr_is_kept_apart(target: ProviderUnderTest) -> None:
    """stderr is not on the stream; `log_tail` has the last 8 KiB of it."""
    script = (
        "import os\ndata = b'e' * 100_000 + b' the end'\n"
        "while data: data = data[os.write(2, data):]\nprint('out')"
    )
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"out\n"
        assert len(sandbox.log_tail) == LOG_TAIL_BYTES
        assert sandbox.log_tail.endswith("e the end")


@registered(commands=True)
async def sandbox_runs_until_its_first_process_ends(target: ProviderUnderTest) -> None:
    """`is_running` is true until the first process ends, and false for a sandbox that is paused."""
    async with target.provider.open(target.python_spec("input()")) as sandbox:
        assert await sandbox.is_running()
        await sandbox.stream.send(b"\n")
        await receive_all(sandbox)
        await sandbox.cause_of_end()
        assert not await sandbox.is_running()
    async with target.provider.open(target.python_spec("input()")) as sandbox:
        await sandbox.pause()
        assert not await sandbox.is_running()


@registered(commands=True)
async def exit_code_is_the_cause_of_end(target: ProviderUnderTest) -> None:
    """When the stream has ended, `cause_of_end` gives the first process's exit code."""
    for code in (0, 3, 134):
        async with target.provider.open(target.python_spec(f"raise SystemExit({code})")) as sandbox:
            await receive_all(sandbox)
            assert await sandbox.cause_of_end() == f"exit code {code}"


@registered(commands=True)
async def stream_ends_with_the_first_process(target: ProviderUnderTest) -> None:
    """The stream ends when the first process exits, though a descendant holds its stdout."""
    script = "import subprocess; subprocess.Popen(['sleep', '1000']); print('leaving')"
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"leaving\n"
    await target.assert_nothing_left()


@registered(commands=True)
async def detached_processes_end_with_the_sandbox(target: ProviderUnderTest) -> None:
    """Processes that left both their session and their parent are gone after the exit."""
    script = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
time.sleep(1000)
"""
    async with target.provider.open(target.python_spec(script)) as sandbox:
        await receive_line(sandbox)
    await target.assert_nothing_left()
