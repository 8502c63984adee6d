"""Sandboxes that are ordinary processes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from pathlib import Path, PurePosixPath

import anyio
import pytest
from decathlon_sandbox.process_table import Process

from decathlon_mcp.driver.client import connect
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.plugins.conformance.target import receive_all
from decathlon_mcp.sandboxes.base import Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.host import processes
from decathlon_mcp.sandboxes.host import sandbox as sandbox_module
from decathlon_mcp.sandboxes.host.processes import ProcessId, is_alive, living_members, read_children
from decathlon_mcp.sandboxes.host.sandbox_folder import LEADER_FILE, OWNER_FILE
from tests.driver.peer import until
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio


async def test_program_has_the_servers_python_none_of_its_settings_and_a_folder_that_is_removed(
    local: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECATHLON_TOKENS", "/secret")
    script = """
import anyio, os, sys, tempfile
print(sys.prefix, [name for name in os.environ if name.startswith("DECATHLON_")], tempfile.mkdtemp())
"""
    with anyio.fail_after(30):
        async with local.provider.open(local.spec("python3", "-c", script)) as sandbox:
            prefix, settings, scratch = (await receive_all(sandbox)).decode().split()
            assert (prefix, settings) == (sys.prefix, "[]")
            assert await anyio.Path(scratch).is_dir()
        assert not await anyio.Path(scratch).exists()


async def test_folders_outside_the_root_are_refused(local: Bench, tmp_path: Path) -> None:
    async with local.provider.open(local.spec()) as sandbox:
        for folder in (PurePosixPath("/etc"), sandbox.root / ".." / "..", PurePosixPath("relative")):
            with pytest.raises(BadRequestError, match="below"):
                await sandbox.get(folder, tmp_path / "out.tar", 1 << 20)
            with pytest.raises(BadRequestError, match="below"):
                await sandbox.put(folder, b"")


async def test_processes_of_a_killed_driver_end_with_the_sandbox(local: Bench) -> None:
    """Such a process may have little of the driver's environment, its own session, and no parent."""
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox, connect(sandbox) as driver:
            script = f"""
import os, time
os.chdir("/")
os.environ.clear()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "1000"], {{}})
    os._exit(0)
os.wait()
open({str(folder_of(local, sandbox.spec) / "root" / "started")!r}, "w").close()
while True: time.sleep(1)
"""
            leader = leader_id(sandbox)

            async def kill_driver() -> None:
                await until((folder_of(local, sandbox.spec) / "root" / "started").exists)
                members.update(living_members(leader))
                os.kill(command_of(sandbox), signal.SIGKILL)

            members: dict[ProcessId, Process] = {}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill_driver)
                with pytest.raises(SandboxLostError, match="exit code 137"):
                    await driver.run(["python3", "-c", script], cwd=str(sandbox.root), timeout_seconds=20)
            assert len(members) == 4  # with the program, and what it has left
            assert living_members(leader, members.keys()) == {}
        await local.assert_nothing_left()


async def test_what_a_killed_first_process_leaves_ends_by_itself(local: Bench) -> None:
    """The driver gets a signal, and ends its own descendants."""
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox, connect(sandbox) as driver:
            command = ["sh", "-c", "setsid sleep 1000 & echo $!"]
            await driver.run(command, cwd=str(sandbox.root), timeout_seconds=20, leave=True)
            members = living_members(leader_id(sandbox))
            assert len(members) == 3
            os.kill(leader_of(sandbox), signal.SIGKILL)
            await until(lambda: not any(is_alive(member) for member in members))
        await local.assert_nothing_left()


async def test_nothing_runs_that_was_not_noted_before(local: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies in the moment in which it starts a sandbox."""

    def die(*_arguments: object) -> None:
        raise OSError(errno.EIO, "died")

    monkeypatch.setattr(sandbox_module, "write_process", die)
    spec = local.python_spec(f"open({str(local.scratch / 'ran')!r}, 'w')")
    with pytest.raises(OSError, match="died"):
        async with local.provider.open(spec):
            pass
    await local.assert_nothing_left()
    assert not (local.scratch / "ran").exists()


# Removal


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_processes_that_do_not_end_delay_no_other_removal(
    local: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel delivers no signal to an uninterruptible process; here none is sent to some."""
    monkeypatch.setattr(processes, "SIGNAL_SECONDS", 2.0)
    send = ProcessId.send
    unkillable: set[int] = set()

    def send_to_others(process_id: ProcessId, number: signal.Signals) -> None:
        if process_id.pid not in unkillable:
            send(process_id, number)

    monkeypatch.setattr(ProcessId, "send", send_to_others)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    ended = anyio.Event()

    async def stuck() -> None:
        async with local.provider.open(local.python_spec(script)) as sandbox:
            unkillable.add(int(await sandbox.stream.receive()))
            await ended.wait()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(stuck)
            async with local.provider.open(local.python_spec(script)) as sandbox:
                await sandbox.stream.receive()
                await until(lambda: len(unkillable) == 2)
                ended.set()
                await anyio.sleep(0.1)
            assert len(local.processes()) == 2, "the other removals had ended"
    assert caplog.text.count("A sandbox could not be removed") == 2
    unkillable.clear()
    assert await local.provider.sweep(local.owner) == 2, "what a sweep needs was kept"
    await local.wait_until_nothing_left()
    gc.collect()  # within the filter of this test


async def test_log_without_end_is_read_slowly(local: Bench) -> None:
    """Otherwise a driver in the agent's hands takes all of the event loop's time."""
    script = """
import os, time
end, written = time.monotonic() + 1, 0
while time.monotonic() < end:
    written += os.write(2, bytes(1 << 16))
print(written >> 20, flush=True)
"""
    async with local.provider.open(local.python_spec(script)) as sandbox:
        assert int(await receive_all(sandbox)) <= 32  # MiB; it was some hundred


async def test_process_whose_main_thread_has_exited_is_killed(local: Bench) -> None:
    """Its state is that of a zombie, and the environment of its main thread is gone."""
    script = """
import ctypes, os, threading, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        threading.Thread(target=time.sleep, args=(1000,)).start()
        print(os.getpid(), flush=True)
        ctypes.CDLL(None).pthread_exit(None)
    os._exit(0)
os.wait()
time.sleep(1000)
"""
    with anyio.fail_after(30):
        async with local.provider.open(local.python_spec(script)) as sandbox:
            status = Path(f"/proc/{int(await sandbox.stream.receive())}/status")
            await until(lambda: "Z (zombie)" in status.read_text())
        await until(lambda: not status.exists() or "Threads:\t1\n" in status.read_text())


async def test_stopped_processes_of_a_dead_server_are_killed(local: Bench) -> None:
    """They do not notice its end."""
    spec = local.spec("env", "-i", "cat")
    with anyio.fail_after(30):
        async with local.provider.open(spec) as sandbox:
            leader, command = leader_of(sandbox), await command_when_started(sandbox)
            command_line = Path(f"/proc/{command}/cmdline")
            await until(lambda: command_line.read_bytes() == b"cat\x00")
            os.kill(leader, signal.SIGSTOP)
            os.kill(command, signal.SIGSTOP)
            assert await local.create_second().sweep(local.owner) == 1
            assert await sandbox.cause_of_end() == "exit code 137"


async def test_another_process_with_the_pid_of_a_dead_servers_is_not_killed(local: Bench) -> None:
    spec = local.spec("cat")
    with anyio.fail_after(30):
        async with local.provider.open(local.spec("env", "-i", "cat")) as stranger:
            async with local.provider.open(spec) as sandbox:
                file = Path(sandbox.root).parent / LEADER_FILE
                pid, started_ticks, boot_id = file.read_text().split()
                for leader in (
                    f"{leader_of(stranger)} {int(started_ticks) - 100} {boot_id}",
                    f"{leader_of(stranger)} {started_ticks} another-boot",
                    f"{pid} many ticks and more",
                    f"-1 0 {boot_id}",
                    f"0 0 {boot_id}",
                ):
                    file.write_text(leader)
                    folder = local.scratch / "sandboxes" / "copy"
                    folder.mkdir()
                    (folder / OWNER_FILE).write_text(local.owner)
                    (folder / LEADER_FILE).write_text(leader)
                    await local.provider.sweep(local.owner)
                    assert not folder.exists()
            assert await stranger.cause_of_end() is None


def leader_of(sandbox: Sandbox) -> int:
    """Pid of a sandbox's first process."""
    return int((Path(sandbox.root).parent / LEADER_FILE).read_text().split()[0])


def leader_id(sandbox: Sandbox) -> ProcessId:
    found = ProcessId.of(leader_of(sandbox))
    assert found is not None
    return found


def command_of(sandbox: Sandbox) -> int:
    """Pid of the command of a sandbox, the driver's mostly: the only child of the first process."""
    (child,) = read_children(leader_of(sandbox))
    return child


async def command_when_started(sandbox: Sandbox) -> int:
    await until(lambda: len(read_children(leader_of(sandbox))) == 1)
    return command_of(sandbox)


def folder_of(local: Bench, spec: SandboxSpec) -> Path:
    return local.scratch / "sandboxes" / spec.name


# Survival


async def test_output_without_a_server_is_kept_for_the_next_one(local: Bench) -> None:
    """Named pipes lose nothing, unlike an engine's streams."""
    script = """
import sys, time
print("ready", flush=True)
input()
print("o" * 30_000, flush=True)
sys.stderr.write("e" * 10_000 + " the end")
sys.stderr.flush()
open("done", "w").close()
input()
"""
    spec = local.python_spec(script, survives=True)
    await local.leave_behind([spec], "none")
    with (folder_of(local, spec) / "stdin").open("wb") as stdin:
        stdin.write(b"\n")
    await until((folder_of(local, spec) / "root" / "done").exists)
    async with local.provider.reattach(local.former_owner, spec) as sandbox:
        received = b""
        while not received.endswith(b"\n" + b"o" * 30_000 + b"\n"):
            received += await sandbox.stream.receive()
        assert sandbox.log_tail.endswith("e the end")


@pytest.mark.parametrize(("name", "replacement"), [("stdin", "link"), ("stdout", "nothing")])
async def test_sandbox_that_replaced_its_pipes_is_lost(local: Bench, name: str, replacement: str) -> None:
    target = local.scratch / "target"
    target.write_text("untouched")
    spec = local.new_spec(survives=True)
    await local.leave_behind([spec], "none")
    pipe = folder_of(local, spec) / name
    pipe.unlink()
    if replacement == "link":
        pipe.symlink_to(target)
    with pytest.raises(SandboxLostError, match=f"cannot be reached: its {name}"):
        async with local.provider.reattach(local.former_owner, spec):
            pass
    assert target.read_text() == "untouched"
    await local.assert_nothing_left()


async def test_another_process_with_the_pid_of_a_surviving_one_is_not_reattached(local: Bench) -> None:
    spec = local.new_spec(survives=True)
    await local.leave_behind([spec], "none")
    async with local.provider.open(local.spec("env", "-i", "cat")) as stranger:
        leader = folder_of(local, spec) / LEADER_FILE
        pid, started_ticks, boot_id = leader.read_text().split()
        leader.write_text(f"{leader_of(stranger)} {int(started_ticks) - 100} {boot_id}")
        with pytest.raises(SandboxLostError):
            async with local.provider.reattach(local.former_owner, spec):
                pass
        assert await stranger.is_running()
    # By the false record, nobody finds the true one.
    ProcessId(int(pid), int(started_ticks)).send(signal.SIGKILL)
    await local.wait_until_nothing_left()
