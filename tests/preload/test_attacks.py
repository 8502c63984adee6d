"""What an agent can do with a preloader, with a fork on its way into a sandbox, and with a fork."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from contextlib import ExitStack, suppress

import anyio
import pytest

from decathlon_mcp.errors import DriverError
from decathlon_mcp.plugins.preload.preloads import Closing
from decathlon_mcp.sandboxes.host.processes import read_children
from decathlon_mcp.sandboxes.host.sandbox_folder import closing_descriptor
from tests.preload.conftest import STATE, Machine, spec_of

pytestmark = pytest.mark.anyio

OUTSIDE = """
import ctypes, os, glob
libc = ctypes.CDLL(None, use_errno=True)
own = os.getpid()
for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
    command = open(f"/proc/{pid}/cmdline").read().replace("\\n", " ")
    if pid not in (1, own):
        print("sees", pid, command)
parent = os.getppid()
for name in ("mem", "environ", "maps", "auxv", "fd/0", "exe", "root", "ns/user", "map_files"):
    try:
        os.open(f"/proc/{parent}/{name}", os.O_RDONLY)
        print("opens", name, "of its parent")
    except OSError:
        pass
for request in (16, 0x4206):
    if libc.ptrace(request, parent, 0, 0) == 0:
        print("traces its parent")
for name in os.listdir("/proc/self/fd"):
    try:
        target = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        continue
    if int(name) > 2 and not target.startswith(("anon_inode:[event", "socket:", "/proc/")):
        print("has", name, target.partition("[")[0])
import gc, socket
for name in os.listdir("/proc/self/fd"):
    try:
        other = socket.socket(fileno=os.dup(int(name)))
        if other.type == socket.SOCK_SEQPACKET:
            print("has a socket of another kind", name)
        other.close()
    except OSError:
        pass
PR_SET_DUMPABLE, PR_GET_DUMPABLE, PR_SET_PDEATHSIG, PR_SET_MM, PR_GET_SECCOMP = 4, 3, 1, 35, 21
if libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) not in (2,):
    print("has no filter")
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
for flags in (CLONE_NEWUSER, CLONE_NEWNS):
    if libc.unshare(flags) == 0:
        print("leaves its namespaces by", hex(flags))
for kind in ("user", "mnt", "pid"):
    try:
        if libc.setns(os.open(f"/proc/self/ns/{kind}", os.O_RDONLY), 0) == 0:
            print("enters namespaces of", kind)
    except OSError:
        pass
print("capabilities", {line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")})
exe = os.open("/proc/self/exe", os.O_RDONLY)
for path in ("..", "../..", "."):
    try:
        os.open(path, os.O_RDONLY, dir_fd=exe)
        print("leaves by its program's file")
    except OSError:
        pass
print(os.path.exists("/root/.bashrc"), os.path.exists(SECRET))
"""
MEMORY = """
import re
found, table = [], bytes(number ^ 1 for number in range(256))
for line in open("/proc/self/maps"):
    place, mode, *_ = line.split()
    if mode.startswith("r") and "[v" not in line:
        start, end = (int(part, 16) for part in place.split("-"))
        with open("/proc/self/mem", "rb", 0) as memory:
            try:
                memory.seek(start)
                content = memory.read(end - start)
            except OSError:
                continue
        found += [line for mark in MARKS if bytes(mark) in content.translate(table)]
print(found)
"""
STOPPING = """
import os, signal, sys, time
traced = 0
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
known, deadline = {1, os.getpid()}, time.monotonic() + 20
print("ready", flush=True)
while time.monotonic() < deadline and len(known) < 2 + MOST:
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in known:
            pid = int(name)
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError:
                continue
            found = []
            for file in ("mem", "environ", "fd", "maps", "fd/3", "fd/4", "fd/5", "fd/6"):
                try:
                    path = f"/proc/{pid}/{file}"
                    os.listdir(path) if file == "fd" else os.open(path, os.O_RDWR)
                    found.append(file)
                except OSError:
                    pass
            if libc.ptrace(16, pid, 0, 0) == 0:
                found.append("trace")
            status = open(f"/proc/{pid}/status").read()
            rights = [line for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
            command = open(f"/proc/{pid}/cmdline").read().replace("\\n", " ")
            print(found, {line.split()[1] for line in rights}, "NoNewPrivs:\\t1" in status, command)
            known.add(pid)
            os.kill(pid, signal.SIGKILL)
"""


async def test_a_fork_reaches_nothing_outside(machine: Machine) -> None:
    process = await machine.preload(STATE)
    code = f"SECRET = '/proc/{process.pid}/root/root'" + OUTSIDE
    fork, _ = machine.preloads.known.pop("state"), machine.preloads.cold
    async with machine.sandbox(STATE) as (_, driver):
        await driver.start(["state"], deadline_seconds=60)
        cold = await machine.call(driver, "run", code=code)
    machine.preloads.known["state"] = fork
    machine.preloads.cold.clear()
    async with machine.sandbox(STATE) as (_, driver):
        await driver.start(["state"], deadline_seconds=60)
        output = await machine.call(driver, "run", code=code)
    assert not machine.preloads.cold
    # The streams of this kind of server are descriptors of its own.
    lines = [line for line in output.splitlines() if "pipe:" not in line]
    assert lines == ["capabilities {'0000000000000000'}", "False False"]
    assert output == cold


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the processes of a sandbox")
async def test_a_fork_has_nothing_of_the_servers_memory_and_of_other_sandboxes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret-of-the-server-1f7b")
    process = await machine.preload(STATE)
    other = {
        **STATE,
        "env": {"TOKEN": "secret-of-another-9c3e"},
        "args": [*STATE["args"], "argument-of-another-77aa"],
    }
    # Changed: the code is in memory too.
    marks = [
        [byte ^ 1 for byte in mark.encode()]
        for mark in ("of-the-server-1f7b", "of-another-9c3e", "of-another-77aa")
    ]
    async with machine.sandbox(other) as (_, driver):
        await driver.start(["state"], deadline_seconds=60)
        found = await machine.call(driver, "run", code=f"MARKS = {marks!r}" + MEMORY)
        assert found != "[]\n"
        async with machine.sandbox(STATE) as (_, second):
            await second.start(["state"], deadline_seconds=60)
            assert await machine.call(second, "run", code=f"MARKS = {marks!r}" + MEMORY) == "[]\n"
    assert not machine.preloads.cold
    environment = await anyio.Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"secret" not in environment
    assert {name.partition(b"=")[0] for name in environment.split(b"\0") if name} <= {
        b"PATH",
        b"HOME",
        b"PYTHONPATH",
    }


async def test_a_fork_that_is_stopped_half_way_gives_nothing_away(machine: Machine) -> None:
    """A process of the sandbox stops each new one as soon as it sees it, looks at it, and kills it."""
    await machine.preload(STATE)
    results: list[str] = []
    async with machine.sandbox(STATE) as (_, driver), anyio.create_task_group() as tasks:

        async def attack() -> None:
            command = ["python3", "-c", f"MOST = 16\n{STOPPING}"]
            results.append((await driver.run(command, cwd="/tmp", timeout_seconds=60)).stdout)

        tasks.start_soon(attack)
        while not results:
            with anyio.move_on_after(1.5), suppress(DriverError):
                await driver.start(["state"], deadline_seconds=30, again=True)
    lines = [line for line in results[0].splitlines() if line != "ready"]
    # What is no fork on its way shows its arguments, and is a server like any other.
    # One without a command line has no memory any more, or not yet.
    half_way = [line for line in lines if "argument" not in line and not line.endswith("True ")]
    assert half_way
    assert [line for line in half_way if not line.startswith("[] {'0000000000000000'} True")] == []


async def test_a_fork_that_stays_stopped_ends_with_its_sandbox(machine: Machine) -> None:
    """Outside, a process waits for the one that was stopped inside."""
    process = await machine.preload(STATE)
    stopped: list[str] = []
    async with machine.sandbox(STATE) as (_, driver), anyio.create_task_group() as tasks:

        async def attack() -> None:
            script = STOPPING.replace("os.kill(pid, signal.SIGKILL)", "pass")
            command = ["python3", "-c", f"MOST = 1\n{script}"]
            stopped.extend((await driver.run(command, cwd="/tmp", timeout_seconds=60)).stdout.splitlines())

        tasks.start_soon(attack)
        while not stopped:
            with anyio.move_on_after(1.5), suppress(DriverError):
                await driver.start(["state"], deadline_seconds=30, again=True)
        assert stopped[1:]
    with anyio.fail_after(30):
        while read_children(process.pid):  # noqa: ASYNC110  (nothing else says it)
            await anyio.sleep(0.05)


async def test_servers_start_by_themselves_while_a_preloader_is_dead(machine: Machine) -> None:
    process = await machine.preload(STATE)
    os.kill(process.pid, signal.SIGKILL)
    kind = machine.preloads.known["state"]
    while kind.process is process:
        await kind.changed.wait()
    async with machine.sandbox(STATE) as (_, driver):
        await driver.start(["state"], deadline_seconds=60)
        assert "state.py" in await machine.call(driver, "run", code="import sys; print(sys.argv)")
    assert machine.preloads.cold
    with anyio.fail_after(60):
        while kind.process is None:
            await kind.changed.wait()
    machine.preloads.cold.clear()
    async with machine.sandbox(STATE) as (_, driver):
        await driver.start(["state"], deadline_seconds=60)
    assert not machine.preloads.cold


async def test_a_descriptor_of_another_kind_lets_no_program_run_outside(machine: Machine) -> None:
    """A driver in the agent's hands sends what is no channel: the fork ran its program where it was."""
    spec = spec_of("reader", "-m", "json.tool")
    process = await machine.preload(spec)
    children = anyio.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    async with machine.sandbox(spec) as (sandbox, _):
        requests = machine.preloads.channel(sandbox)
        assert requests is not None
        with requests, closing_descriptor(os.memfd_create("file")) as descriptor:
            socket.send_fds(requests, [b"reader"], [descriptor])
            with anyio.fail_after(30):
                while not await children.read_text():  # noqa: ASYNC110  (there is no event for it)
                    await anyio.sleep(0.001)
                while await children.read_text():  # noqa: ASYNC110
                    await anyio.sleep(0.05)


def unread_connection(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A TCP socket that the last one who closes it closes only when its peer, which reads nothing, has."""
    own = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    own.setblocking(False)
    with suppress(BlockingIOError):
        while own.send(bytes(1 << 16)):
            pass
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 70))
    return own, peer


async def test_a_descriptor_that_cannot_be_closed_at_once_stops_nothing(machine: Machine) -> None:
    """Also one of several, and one that is in the queue of another."""
    spec = spec_of("reader", "-m", "json.tool")
    async with machine.sandbox(spec) as (sandbox, _):
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            requests = machine.preloads.channel(sandbox)
            assert requests is not None
            sent: list[socket.socket] = []
            for _ in range(4):
                own, peer = unread_connection(listener)
                stack.enter_context(peer)
                sent.append(own)
            outer, inner = socket.socketpair()
            socket.send_fds(outer, [b"x"], [sent[3].fileno()])
            sent.append(inner)
            socket.send_fds(requests, [b"reader"], [sent[0].fileno()])
            socket.send_fds(requests, [b"reader"], [each.fileno() for each in (sent[1], sent[2], inner)])
            for each in (*sent, outer, requests):
                each.close()
            began = time.monotonic()
            await anyio.sleep(0.5)
            assert time.monotonic() - began < 60


async def test_a_descriptor_that_fails_to_close_keeps_no_other_open() -> None:
    end, other = os.pipe()
    with closing_descriptor(end):
        Closing().close(1 << 30, other)  # as a file whose disk is full
        with anyio.fail_after(10):
            await anyio.wait_readable(end)
