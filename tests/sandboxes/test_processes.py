"""Providers that run real processes: what the first one says, how it ends, and that all ends with it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteReceiveStream, Process

from decathlon_mcp.driver_client.driver import connect
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.sandboxes.log_tail import LOG_TAIL_BYTES
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio

ECHO = """
import os
while data := os.read(0, 65536):
    while data:
        data = data[os.write(1, data):]
"""


async def everything(stream: ByteReceiveStream) -> bytes:
    """What comes until the stream ends."""
    parts: list[bytes] = []
    with suppress(anyio.EndOfStream):
        while True:
            parts.append(await stream.receive())
    return b"".join(parts)


async def line(sandbox: Sandbox) -> str:
    said = b""
    while not said.endswith(b"\n"):
        said += await sandbox.stream.receive()
    return said.decode().strip()


@pytest.mark.parametrize("size", [1, 100_000, 20_000_000])
async def test_bytes_come_back_as_they_were_sent(real: Bench, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    came = b""
    with anyio.fail_after(60):
        async with real.provider.open(real.python(ECHO)) as sandbox, anyio.create_task_group() as tasks:

            async def send() -> None:
                await sandbox.stream.send(data)
                await sandbox.stream.send_eof()

            tasks.start_soon(send)
            came = await everything(sandbox.stream)
    assert came == data


async def test_what_it_said_last_is_read_though_it_has_ended(real: Bench) -> None:
    with anyio.fail_after(30):
        async with real.provider.open(real.python("print('x' * 100_000)")) as sandbox:
            assert await everything(sandbox.stream) == b"x" * 100_000 + b"\n"
            with pytest.raises(anyio.EndOfStream):
                await sandbox.stream.receive()


async def test_stderr_is_kept_apart_and_only_its_end_is_kept(real: Bench) -> None:
    script = "import sys; sys.stderr.write('e' * 100_000 + ' the end'); sys.stderr.flush(); print('out')"
    with anyio.fail_after(30):
        async with real.provider.open(real.python(script)) as sandbox:
            assert await everything(sandbox.stream) == b"out\n"
            assert len(sandbox.log_tail) == LOG_TAIL_BYTES
            assert sandbox.log_tail.endswith("e the end")


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("raise SystemExit(0)", "exit code 0"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.abort()", "exit code 134"),
    ],
)
async def test_how_the_first_process_ended_is_told(real: Bench, script: str, cause: str) -> None:
    if "abort" in script and real.engine is not None:
        script = "raise SystemExit(134)"  # as a container's first process it is spared its own signals
    with anyio.fail_after(30):
        async with real.provider.open(real.python(script)) as sandbox:
            await everything(sandbox.stream)
            assert await sandbox.cause_of_end() == cause


async def test_the_stream_ends_with_the_first_process_though_a_descendant_holds_it(real: Bench) -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '1000']); print('leaving')"
    with anyio.fail_after(30):
        async with real.provider.open(real.python(script)) as sandbox:
            assert await everything(sandbox.stream) == b"leaving\n"
        assert real.left() == []


async def test_a_process_that_fled_its_session_and_its_parent_ends_with_the_sandbox(real: Bench) -> None:
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
    with anyio.fail_after(30):
        async with real.provider.open(real.python(script)) as sandbox:
            await line(sandbox)
        assert real.left() == []


async def test_python3_is_found_and_the_environment_is_given(real: Bench) -> None:
    spec = real.spec(environment=(("GREETING", "good day"), ("DECATHLON_LEASE_SECONDS", "60")))
    with anyio.fail_after(30):
        async with real.provider.open(spec) as sandbox, connect(sandbox) as link:
            script = "import os, sys; print(sys.version_info >= (3, 10), os.environ['GREETING'], os.getcwd())"
            result = await link.run(["python3", "-c", script], cwd=str(sandbox.root), timeout_seconds=20)
            assert result.stdout == f"True good day {sandbox.root}\n"


async def test_a_server_that_is_killed_leaves_no_process_behind(real: Bench, tmp_path: Path) -> None:
    with anyio.fail_after(60):
        async with server_with_three_sandboxes(real, tmp_path) as server:
            assert len(real.left()) >= 3
            server.kill()
            await server.wait()
        if real.engine is None:
            await real.no_process_is_left()
            assert await real.provider.sweep(real.owner) == 3, "folders are left, and nothing else"
        await real.nothing_is_left()


async def test_a_server_that_is_asked_to_stop_leaves_nothing_behind(real: Bench, tmp_path: Path) -> None:
    with anyio.fail_after(60):
        async with server_with_three_sandboxes(real, tmp_path) as server:
            server.terminate()
            assert await server.wait() == 0
        assert real.left() == []


@asynccontextmanager
async def server_with_three_sandboxes(real: Bench, tmp_path: Path) -> AsyncGenerator[Process]:
    """A process of its own, as a server is, in the folder that the bench's provider sweeps."""
    about = {"owner": real.owner, "image": real.image, "folder": str(tmp_path / "sandboxes")}
    script = str(Path(__file__).parent / "server.py")
    async with await anyio.open_process([sys.executable, script, json.dumps(about)], stderr=None) as server:
        assert server.stdout is not None
        assert await server.stdout.receive() == b"ready\n"
        yield server
