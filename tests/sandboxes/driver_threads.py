"""Runs in a container, as root without capabilities: attacks every thread of its first process.

Prints a JSON object: the number of threads, the attacks on limits that were not refused, and the errors of
ordinary programs.
"""

# pyright: basic

import ctypes
import json
import mmap
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
PRLIMIT64, X32 = 302, 0x40000000
PRLIMIT64_I386 = 340
MAP_32BIT = 0x40


def attack_limits(threads):
    """The attacks that were not refused."""
    accepted = []
    for thread in threads:
        for limit in LIMITS:
            soft, hard = resource.getrlimit(limit)
            resource.prlimit(thread, limit)  # reading is allowed
            for values in ((0, 0), (0, hard), (soft, hard)):
                try:
                    resource.prlimit(thread, limit, values)
                except PermissionError:
                    continue
                accepted.append(f"prlimit of thread {thread}")
        # Ids are 32 bits wide: the kernel does not look at the upper half.
        pointer = ctypes.create_string_buffer(16)
        if (
            libc.syscall(PRLIMIT64, ctypes.c_long(thread | 1 << 40), resource.RLIMIT_NOFILE, pointer, None)
            == 0
        ):
            accepted.append("prlimit with a wide id")
        for upper in (0x7F0000000000, 1 << 32):
            libc.syscall(PRLIMIT64, thread, resource.RLIMIT_NOFILE, ctypes.c_void_p(upper), None)
            if ctypes.get_errno() != 1:
                accepted.append(f"prlimit with a pointer whose lower half is zero: {ctypes.get_errno()}")
        if libc.syscall(PRLIMIT64 | X32, thread, resource.RLIMIT_NOFILE, pointer, None) == 0:
            accepted.append("prlimit of the x32 ABI")
    return accepted


def attack_as_i386(thread):
    """Call prlimit64 by the 32-bit entry of the kernel; returns minus the error number."""
    memory = libc.mmap(None, 4096, 7, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT, -1, 0)
    code = bytes.fromhex("53 89f8 89f3 31f6 4189c8 89d1 4489c2 cd80 4863c0 5b c3")
    ctypes.memmove(memory, code, len(code))
    call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 4)(memory)
    return call(PRLIMIT64_I386, thread, resource.RLIMIT_NOFILE, memory + 2048)


def slow_down(threads):
    """What is allowed against threads, and signals; the driver must survive them."""
    for thread in threads:
        attacks = (
            partial(os.setpriority, os.PRIO_PROCESS, thread, 19),
            partial(os.sched_setscheduler, thread, os.SCHED_IDLE, os.sched_param(0)),
            partial(os.sched_setaffinity, thread, {min(os.sched_getaffinity(0))}),
        )
        for attack in attacks:
            try:
                attack()
            except PermissionError:
                continue
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGTSTP):
            libc.syscall(234, 1, thread, number)  # tgkill
            libc.syscall(200, thread, number)  # tkill
            siginfo = (ctypes.c_int * 32)(number, 0, -1)
            libc.syscall(297, 1, thread, number, siginfo)  # rt_tgsigqueueinfo
    for name in ("comm", "timerslack_ns", "autogroup", "oom_score_adj", "coredump_filter", "clear_refs"):
        for folder in ("/proc/1", *(f"/proc/1/task/{thread}" for thread in threads)):
            try:
                Path(folder, name).write_text("1")
            except OSError:
                continue


ORDINARY = (
    "ulimit -n 512 && test $(ulimit -n) = 512",
    "prlimit --nofile=256:256 true",
    "prlimit --pid $$",
    "timeout 5 true",
    "nice -n 5 true",
    "ionice -c 3 true",
    "taskset -c $(python3 -c 'import os; print(min(os.sched_getaffinity(0)))') true",
    "chrt --idle 0 true",
    "if command -v node > /dev/null; then node -e 'process.exit(0)'; fi",
    "python3 -c 'import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))'",
    "sleep 5 & renice -n 3 -p $! && kill $!",
)


def ordinary_programs():
    """The errors of programs that set their own limits and the scheduling of their own threads."""
    errors = []
    for command in ORDINARY:
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        if result.returncode:
            errors.append(f"{command}: {result.stderr}")
    thread = threading.Thread(target=time.sleep, args=(2,))
    thread.start()
    try:
        os.sched_setaffinity(thread.native_id or 0, os.sched_getaffinity(0))  # pthread_setaffinity_np
    except OSError as error:
        errors.append(str(error))
    thread.join()
    return errors


if len(sys.argv) > 1:
    sys.exit(0 if attack_as_i386(int(sys.argv[1])) else 3)
threads = [int(name) for name in os.listdir("/proc/1/task")]  # noqa: PTH208
accepted = attack_limits(threads)
if platform.machine() == "x86_64":
    for thread in threads:
        # By a signal it ends on a kernel without this entry.
        if subprocess.run([sys.executable, __file__, str(thread)]).returncode == 3:
            accepted.append("prlimit by the i386 ABI")
slow_down(threads)
report = {"threads": len(threads), "accepted": accepted, "errors": ordinary_programs()}
sys.stdout.write(json.dumps(report))
