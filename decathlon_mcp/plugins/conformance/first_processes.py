"""Checks of pausing, of first processes of all kinds, of their limits, and of signals.

What is ignored or blocked outlives execve(2). A first process that ignores SIGTERM, or that was started so,
makes every program below it ignore it: `Process.terminate` and a shell's `kill` then have no effect.
"""

from __future__ import annotations

import json
from dataclasses import replace

import anyio

from decathlon_mcp.errors import ImageError
from decathlon_mcp.plugins.conformance.target import (
    Probe,
    ProviderUnderTest,
    download,
    raises,
    receive_all,
    receive_line,
    registered,
)
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY, LimitName, Limits, Sandbox
from decathlon_mcp.sandboxes.streams import LOG_TAIL_BYTES

SIGNALS_SCRIPT = r"""
import json, multiprocessing, os, shutil, signal, subprocess, sys, tempfile, time

WAIT = 20
PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEP = ["sleep", "1000"]
failures = {}


def expect(name, found, wanted):
    if found != wanted:
        failures[name] = f"{found!r} instead of {wanted!r}"


def shell(name, script, wanted, program="sh"):
    try:
        done = subprocess.run([program, "-c", script], capture_output=True, text=True, timeout=WAIT)
    except subprocess.TimeoutExpired:
        failures[name] = "does not end"
    else:
        expect(name, done.stdout.split(), wanted.split())


def ended(process):
    try:
        return process.wait(WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "not ended"


def status(process):
    fields = {}
    with open(f"/proc/{process.pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("SigBlk", "SigIgn"):
                # Without 32 and 33, which are glibc's own: its posix_spawn, as `make` uses it, ignores them.
                fields[name] = int(value, 16) & ~(3 << 31)
    return fields


def command_line(process):
    with open(f"/proc/{process.pid}/cmdline", "rb") as file:
        return file.read(4096)


def dispositions():
    process = subprocess.Popen(SLEEP)
    for name, value in status(process).items():
        expect(name, value, 0)
    process.kill()
    process.wait()


def one_by_one():
    for name in "TERM INT HUP QUIT USR1 USR2 ALRM PIPE XFSZ VTALRM".split():
        number = getattr(signal, "SIG" + name)
        process = subprocess.Popen(SLEEP)
        process.send_signal(number)
        expect(f"SIG{name} ends a program", ended(process), -number)
    process = subprocess.Popen(SLEEP)
    process.terminate()
    expect("Popen.terminate", ended(process), -signal.SIGTERM)
    script = (
        # Short ones: a signal just before a sleep does not end it.
        "import time\ntry:\n print('ready', flush=True)\n while True: time.sleep(0.05)\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    process = subprocess.Popen([*PYTHON, script], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    expect("KeyboardInterrupt", (ended(process), process.stdout.read()), (0, "interrupted\n"))
    process = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    process.stdout.close()
    expect("a broken pipe", ended(process), -signal.SIGPIPE)


def groups_and_sessions():
    process = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & sleep 1000 & echo started; wait"],
        stdout=subprocess.PIPE, start_new_session=True,
    )
    process.stdout.readline()
    expect("a session of its own", os.getsid(process.pid), process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    expect("a process group", ended(process), -signal.SIGTERM)
    # Its standard output ends only when the whole group is gone.
    expect("the rest of the group", process.stdout.read(), b"")
    if shutil.which("nohup"):
        process = subprocess.Popen(
            ["nohup", *SLEEP], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + WAIT
        while not command_line(process).startswith(b"sleep") and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGHUP)
        expect("nohup ignores SIGHUP", process.poll(), None)
        process.terminate()
        expect("nohup takes SIGTERM", ended(process), -signal.SIGTERM)


def shells():
    for name in ("TERM", "INT", "HUP"):
        shell(f"trap {name}", f"trap 'echo caught; exit 0' {name}; kill -{name} $$; echo on", "caught")
    shell("kill PID", "sleep 1000 & kill $!; wait $!; echo $?", "143")
    shell("kill -HUP PID", "sleep 1000 & kill -HUP $!; wait $!; echo $?", "129")
    if shutil.which("timeout"):
        shell("timeout", "timeout 0.1 sleep 1000; echo $?", "124")
    if shutil.which("bash"):
        jobs = "set -m; sleep 1000 & kill -STOP %1; kill -CONT %1; kill %1; wait %1; echo $?"
        shell("job control", jobs, "143", "bash")
        shell("the pipeline's status", "yes | head -n 1; echo ${PIPESTATUS[0]}", "y 141", "bash")
    process = subprocess.Popen(SLEEP)
    process.send_signal(signal.SIGSTOP)
    expect("SIGSTOP", os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), True)
    process.send_signal(signal.SIGCONT)
    expect("SIGCONT", os.WIFCONTINUED(os.waitpid(process.pid, os.WCONTINUED)[1]), True)
    process.terminate()
    expect("SIGTERM after SIGCONT", ended(process), -signal.SIGTERM)


def pools():
    # The server of `forkserver` has a socket in its temporary folder, and a socket's path has 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        multiprocessing.current_process()._config["tempdir"] = folder
        for method in ("fork", "spawn", "forkserver"):
            pools_of(method)


def pools_of(method):
    context = multiprocessing.get_context(method)
    process = context.Process(target=time.sleep, args=(1000,))
    process.start()
    process.terminate()
    process.join(WAIT)
    expect(f"Process.terminate, {method}", process.exitcode, -signal.SIGTERM)
    if process.is_alive():
        process.kill()
        return  # a pool would not end
    with context.Pool(2) as pool:
        expect(f"Pool, {method}", pool.map(abs, [-1, 2]), [1, 2])
    pool.join()


def main():
    for check in (dispositions, one_by_one, groups_and_sessions, shells, pools):
        try:
            check()
        except Exception as error:
            failures[check.__name__] = repr(error)
    print(json.dumps(failures), flush=True)


if __name__ == "__main__":
    main()
"""
"""A program that tries signals, process groups, job control and `multiprocessing` on processes of its own.

Prints a JSON object: for each case that failed, what was found. Python 3.10 or later, `sh`, `sleep` and
`yes`; `bash`, `nohup` and `timeout` where they are there.
"""


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


@registered("commands", seconds=120)
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


@registered("commands")
async def output_before_exit_is_received(target: ProviderUnderTest) -> None:
    """Everything that a process wrote before it exited is received, then EndOfStream, repeatedly."""
    # A large write may be carried out in part (write(2)), and `print` does not go on with the rest.
    script = "import os\ndata = b'x' * 100_000 + b'\\n'\nwhile data: data = data[os.write(1, data):]"
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"x" * 100_000 + b"\n"
        with raises(anyio.EndOfStream):
            await sandbox.stream.receive()


@registered("commands")
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


@registered("commands")
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


@registered("commands")
async def exit_code_is_the_cause_of_end(target: ProviderUnderTest) -> None:
    """When the stream has ended, `cause_of_end` gives the first process's exit code."""
    for code in (0, 3, 134):
        async with target.provider.open(target.python_spec(f"raise SystemExit({code})")) as sandbox:
            await receive_all(sandbox)
            assert await sandbox.cause_of_end() == f"exit code {code}"


@registered("commands")
async def stream_ends_with_the_first_process(target: ProviderUnderTest) -> None:
    """The stream ends when the first process exits, though a descendant holds its stdout."""
    script = "import subprocess; subprocess.Popen(['sleep', '1000']); print('leaving')"
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"leaving\n"
    await target.assert_nothing_left()


@registered("commands")
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


@registered("commands", seconds=180)
async def programs_take_signals_as_usual(target: ProviderUnderTest) -> None:
    """Signals end programs, shells trap them, and `multiprocessing` works, below any first process."""
    async with target.provider.open(target.python_spec(SIGNALS_SCRIPT)) as sandbox:
        failures = json.loads(await receive_line(sandbox))
        assert failures == {}, failures


FILL_MEMORY = "blocks = []\nwhile True: blocks.append(b'x' * (1 << 20))"
START_PROCESSES = """
import os, time
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError as error:
    print(error.strerror, count < 20)
"""


@registered("commands")
async def memory_over_the_limit_is_the_cause_of_end(target: ProviderUnderTest) -> None:
    """A first process that the kernel kills at the limit on memory has that as the cause of its end."""
    if _limits(target, "memory"):
        spec = replace(target.python_spec(FILL_MEMORY), limits=Limits(memory_mib=64))
        async with target.provider.open(spec) as sandbox:
            await receive_all(sandbox)
            assert await sandbox.cause_of_end() == OUT_OF_MEMORY


@registered("commands")
async def number_of_processes_is_limited(target: ProviderUnderTest) -> None:
    """A sandbox can start as many processes as its spec says, and no more."""
    if _limits(target, "pids"):
        spec = replace(target.python_spec(START_PROCESSES), limits=Limits(memory_mib=256, pids=16))
        async with target.provider.open(spec) as sandbox:
            assert await receive_all(sandbox) == b"Resource temporarily unavailable True\n"


@registered("commands")
async def missing_program_is_an_error_and_leaves_nothing(target: ProviderUnderTest) -> None:
    """A program that the image does not have is an ImageError that names it."""
    with raises(ImageError, "no-such-program"):
        async with target.provider.open(target.new_spec(("no-such-program",))):
            pass
    await target.assert_nothing_left()


def _limits(target: ProviderUnderTest, name: LimitName) -> bool:
    return target.provider.isolation != "none" and name not in target.provider.unlimited
