"""Checks of sandboxes that can be saved, for providers with that capability (`sandboxes.capabilities`)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from decathlon_mcp.errors import BadRequestError, SandboxLostError, SnapshotError
from decathlon_mcp.plugins.conformance.target import (
    Probe,
    ProviderUnderTest,
    download,
    raises,
    receive_all,
    receive_line,
    registered,
)
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.capabilities import SavedSandbox, Snapshot, SnapshotProvider, snapshots_of

# What it has of each kind grows with every line that it reads.
_STATE = """
import json, mmap, os, random, signal, socket, subprocess, sys, threading, time
count = "import sys\\nn = 0\\nfor line in sys.stdin: n += 1; print(n, line, end='', flush=True)"
child = subprocess.Popen(["python3", "-c", count], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
unlinked = open("unlinked", "w+"); os.unlink("unlinked")
memory = open("/dev/shm/file", "w+")
mapped = mmap.mmap(-1, 4096)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname()[:2])
peer = server.accept()[0]
heard = b""
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
sleeper = threading.Event()
threading.Timer(1.5, sleeper.set).start()
print("ready", flush=True)
for line in sys.stdin.buffer:
    child.stdin.write(line); child.stdin.flush()
    piped = child.stdout.readline().decode().strip()
    texts = []
    for file in (unlinked, memory, open("plain", "a+")):
        file.write(line.decode()); file.flush(); file.seek(0)
        texts.append(file.read().split())
    mapped.write(line); before = ticks
    client.sendall(line); heard += peer.recv(100)
    deadline = time.monotonic() + 20
    while (ticks == before or not sleeper.wait(0.01)) and time.monotonic() < deadline: pass
    state = {"piped": piped, "texts": texts, "mapped": mapped[:mapped.tell()].decode().split()}
    state |= {"heard": heard.decode().split(), "ticks": ticks > before, "slept": sleeper.is_set()}
    state |= {"drawn": random.random(), "fresh": os.urandom(8).hex()}
    print(json.dumps(state | {"pids": [os.getpid(), child.pid]}), flush=True)
"""


@registered("snapshots", seconds=60)
async def copies_go_on_where_the_sandbox_was_saved(target: ProviderUnderTest) -> None:
    """Processes, pipes, files, memory, connections and timers go on in each copy, and in the original."""
    provider, folder = _provider(target), target.scratch / "saved"
    spec = target.python_spec(_STATE)
    async with provider.open(spec) as original:
        assert await receive_line(original) == "ready"
        await original.stream.send(b"before\n")
        # It is saved while a timer of the call runs.
        await anyio.sleep(0.2)
        snapshot = await original.snapshot(folder)
        assert json.loads(await receive_line(original))["piped"] == "1 before"
        assert folder.stat().st_mode & 0o077 == 0
        assert snapshot.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
        async with _copy(target, spec, folder) as first, _copy(target, spec, folder) as second:
            states: list[Any] = []
            for sandbox, text in ((first, "one"), (second, "two"), (original, "three")):
                if sandbox is not original:
                    # The call that ran is carried out in each copy, and its reply comes on their own streams.
                    assert json.loads(await receive_line(sandbox))["piped"] == "1 before"
                await sandbox.stream.send(f"{text}\n".encode())
                states.append(state := json.loads(await receive_line(sandbox)))
                both = ["before", text]
                assert state["piped"] == f"2 {text}"
                assert state["texts"] == [both, both, both]
                assert state["mapped"] == state["heard"] == both
                assert state["ticks"]
                assert state["slept"]
            assert states[0]["pids"] == states[1]["pids"] == states[2]["pids"]
            # A generator goes on where it was, and the kernel's is another in each.
            assert states[0]["drawn"] == states[1]["drawn"] == states[2]["drawn"]
            assert len({state["fresh"] for state in states}) == 3
            for sandbox, text in ((first, "one"), (original, "three")):
                files = await download(sandbox, sandbox.root, target.scratch / "out.tar")
                assert files["plain"][1] == f"before\n{text}\n".encode()
    await target.assert_nothing_left()


@registered("snapshots", seconds=120)
async def ten_copies_and_the_original_do_not_see_each_other(target: ProviderUnderTest) -> None:
    """Ten copies that are opened at once have files of their own, and end without the others."""
    provider, folder = _provider(target), target.scratch / "saved"
    spec = target.new_spec()
    all_wrote, wrote = anyio.Event(), 0

    async with provider.open(spec) as original:
        await Probe(original).write(original.root / "file", "original")
        await original.snapshot(folder)

        async def copy(text: str) -> None:
            nonlocal wrote
            async with _copy(target, spec, folder) as sandbox:
                await Probe(sandbox).write(sandbox.root / text, text)
                await Probe(sandbox).write(sandbox.root / "file", text)
                wrote += 1
                if wrote == 10:
                    all_wrote.set()
                await all_wrote.wait()
                files = await download(sandbox, sandbox.root, target.scratch / f"{text}.tar")
                contents = {name: content for name, (_, content, *_) in files.items() if content}
                assert contents == {text: text.encode(), "file": text.encode()}

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(copy, f"copy-{number}")
        files = await download(original, original.root, target.scratch / "out.tar")
        assert files["file"][1] == b"original"
    # The snapshot does not need the sandbox that was saved, and neither do copies of copies.
    async with _copy(target, spec, folder) as sandbox:
        await Probe(sandbox).write(sandbox.root / "file", "copy")
        await sandbox.snapshot(target.scratch / "again")
    async with _copy(target, spec, target.scratch / "again") as sandbox:
        await Probe(sandbox).ping()
        files = await download(sandbox, sandbox.root, target.scratch / "out.tar")
        assert files["file"][1] == b"copy"
    await target.assert_nothing_left()


@registered("snapshots", seconds=60)
async def unusable_snapshots_are_refused(target: ProviderUnderTest) -> None:
    """A snapshot that is damaged, gone, or of another sandbox is a SnapshotError, and leaves nothing."""
    provider, folder = _provider(target), target.scratch / "saved"
    spec = target.new_spec()
    async with provider.open(spec) as sandbox:
        await sandbox.snapshot(folder)
        with raises(SnapshotError):
            await sandbox.snapshot(folder)
        await Probe(sandbox).ping()
    other = target.python_spec("print('another')")
    await _refused(target, other, folder)
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    for damage in (_change, _shorten):
        damaged = target.scratch / damage.__name__
        shutil.copytree(folder, damaged)
        damage(damaged / largest.name)
        await _refused(target, spec, damaged)
    for file in list(folder.iterdir()):
        file.unlink()
        await _refused(target, spec, folder)
    folder.rmdir()
    await _refused(target, spec, folder)
    await target.assert_nothing_left()


@registered("snapshots", seconds=60)
async def sandboxes_that_do_not_run_are_not_saved(target: ProviderUnderTest) -> None:
    """A sandbox that is paused, whose first process has ended, or that was closed is lost."""
    folder = target.scratch / "saved"
    async with _provider(target).open(target.new_spec()) as paused:
        await paused.pause()
        with raises(SandboxLostError):
            await paused.snapshot(folder)
    with raises(SandboxLostError):
        await paused.snapshot(folder)
    async with _provider(target).open(target.new_spec()) as ended:
        await ended.stream.send_eof()
        await receive_all(ended)
        with raises(SandboxLostError):
            await ended.snapshot(folder)
    assert not list(target.scratch.glob("*saved*"))
    await target.assert_nothing_left()


@registered("snapshots", seconds=120)
async def cancelled_saving_and_opening_leave_nothing(target: ProviderUnderTest) -> None:
    """A saving, or an opening of a copy, that is cancelled at any moment leaves nothing, or what is whole."""
    provider, spec = _provider(target), target.new_spec()
    whole = target.scratch / "saved"
    async with provider.open(spec) as original:
        await original.snapshot(whole)
        for step in range(8):
            folder = target.scratch / f"saved-{step}"
            task = asyncio.create_task(original.snapshot(folder))
            await asyncio.wait([task], timeout=step * 0.06)
            task.cancel()
            await asyncio.wait([task])
            if folder.exists():
                async with _copy(target, spec, folder) as sandbox:
                    await Probe(sandbox).ping()
            await Probe(original).ping()
    await target.wait_until_nothing_left()
    for step in range(8):
        with anyio.move_on_after(step * 0.1):
            async with _copy(target, spec, whole) as sandbox:
                await Probe(sandbox).ping()
        await target.wait_until_nothing_left()
    assert not [path for path in target.scratch.iterdir() if path.name.startswith(".")]


@registered("survival", "snapshots", seconds=120)
async def killed_server_leaves_whole_snapshots_only(target: ProviderUnderTest) -> None:
    """After a server was killed while it saved or restored, its snapshots are whole, and no more is left."""
    spec = target.new_spec(survives=True)
    for _ in range(2):
        await target.leave_behind([spec], "save")
        await target.provider.sweep(target.former_owner)
        await target.wait_until_nothing_left()
        saved = list(target.scratch.glob("*saved-by-server*"))
        assert saved
        for folder in saved:
            async with _copy(target, spec, folder) as sandbox:
                await Probe(sandbox).ping()
            shutil.rmtree(folder)
    await target.assert_nothing_left()


@registered("survival", "snapshots", seconds=60)
async def copy_survives_its_server(target: ProviderUnderTest) -> None:
    """The copy that a killed server has opened is reattached as any sandbox."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "copy")
    async with target.provider.reattach(target.former_owner, spec) as sandbox:
        await Probe(sandbox, reopened=True).ping()
        with raises(BadRequestError, "already"):
            async with target.provider.reattach(target.former_owner, spec):
                pass
    shutil.rmtree(target.scratch / "saved-by-server")
    await target.assert_nothing_left()


def _provider(target: ProviderUnderTest) -> SnapshotProvider:
    provider = snapshots_of(target.provider)
    assert provider is not None, "the provider does not say that it has snapshots"
    return provider


@asynccontextmanager
async def _copy(target: ProviderUnderTest, spec: SandboxSpec, folder: Path) -> AsyncGenerator[SavedSandbox]:
    """A copy, under a new name, of a sandbox of that kind."""
    new = target.new_spec(spec.command, survives=spec.survives)
    async with _provider(target).open(new, snapshot=Snapshot(folder)) as sandbox:
        assert sandbox.spec is new
        assert await sandbox.is_running()
        yield sandbox


async def _refused(target: ProviderUnderTest, spec: SandboxSpec, folder: Path) -> None:
    with raises(SnapshotError):
        async with _copy(target, spec, folder):
            pass


def _change(file: Path) -> None:
    """Change one bit in the middle."""
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        byte = content.read(1)[0]
        content.seek(-1, 1)
        content.write(bytes([byte ^ 1]))


def _shorten(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)
