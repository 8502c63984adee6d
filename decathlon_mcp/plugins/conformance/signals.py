"""Checks that programs in a sandbox take signals as they do outside of one.

What is ignored or blocked outlives execve(2). A first process that ignores SIGTERM, or that was started so,
makes every program below it ignore it: `Process.terminate` and a shell's `kill` then have no effect.
"""

from __future__ import annotations

import json

from decathlon_mcp.plugins.conformance.probe import receive_line
from decathlon_mcp.plugins.conformance.registry import registered
from decathlon_mcp.plugins.conformance.target import ProviderUnderTest

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


@registered(seconds=180, commands=True)
async def programs_take_signals_as_usual(target: ProviderUnderTest) -> None:
    """Signals end programs, shells trap them, and `multiprocessing` works, below any first process."""
    async with target.provider.open(target.python_spec(SIGNALS_SCRIPT)) as sandbox:
        failures = json.loads(await receive_line(sandbox))
        assert failures == {}, failures
