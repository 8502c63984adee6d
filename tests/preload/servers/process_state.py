"""What the process of a server is like. Standard library only; imports nothing before it is asked."""

from __future__ import annotations

import sys
from typing import Any


def process_state() -> dict[str, Any]:
    """What must be the same for a server that starts by itself and for one that is a fork."""
    import ctypes
    import inspect
    import locale
    import os
    import resource
    import signal
    import site
    import time

    def lines(name: str) -> list[str]:
        with open(f"/proc/self/{name}", encoding="utf-8") as file:
            return file.read().splitlines()

    main = sys.modules["__main__"]
    streams: list[Any] = [sys.__stdin__, sys.__stdout__, sys.__stderr__]
    interpreter: Any = sys
    kept = ("Name", "Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Sig", "Shd", "Threads")
    kept = (*kept, "CoreDumping", "THP", "Cpus", "Mems")
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "flags": repr(sys.flags),
        "path": sys.path,
        "executable": [sys.executable, interpreter._base_executable, sys.prefix, sys.exec_prefix],
        "environ": sorted(os.environ.items()),
        "posix": sorted((k.decode(), v.decode()) for k, v in __import__("posix").environ.items()),
        "cwd": os.getcwd(),
        "main": {k: repr(v) for k, v in vars(main).items() if k.startswith("__") and k != "__builtins__"},
        "main name": main.__name__,
        "frames": [(frame.filename, frame.function) for frame in inspect.stack()][-6:],
        "limits": [resource.getrlimit(number) for number in range(16)],
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
        "descriptor kinds": [os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(3)],
        "exe": os.readlink("/proc/self/exe"),
        "root": os.readlink("/proc/self/root"),
        "status": [line for line in lines("status") if line.startswith(kept)],
        "cmdline": lines("cmdline"),
        "environment": sorted(lines("environ")[0].split("\0")),
        "comm": lines("comm"),
        "signals": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "namespaces": sorted(
            (name, os.stat(f"/proc/1/ns/{name}").st_ino == os.stat(f"/proc/self/ns/{name}").st_ino)
            if os.access(f"/proc/1/ns/{name}", os.R_OK)
            else (name, None)
            for name in os.listdir("/proc/self/ns")
        ),
        "groups": lines("cgroup"),
        "oom": lines("oom_score_adj"),
        "personality": lines("personality"),
        "merges": ctypes.CDLL(None).prctl(68, 0, 0, 0, 0),  # PR_GET_MEMORY_MERGE
        "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getppid()],
        "streams": [
            [stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty()]
            for stream in streams
        ],
        "locale": [locale.setlocale(locale.LC_ALL, None), locale.getpreferredencoding(), time.tzname],
        "encodings": [sys.getfilesystemencoding(), sys.getdefaultencoding()],
        "site": [site.ENABLE_USER_SITE, site.USER_SITE, site.USER_BASE],
        "threads": [t.name for t in __import__("threading").enumerate()][:1],
        "nice": [os.nice(0), os.sched_getscheduler(0), len(os.sched_getaffinity(0))],
        "mounts": lines("mountinfo"),
        "dumpable": oct(os.stat("/proc/self/mem").st_uid),
        "modules": sorted(sys.modules),
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), len(sys.meta_path), len(sys.path_hooks)],
        "origin": __import__("multiprocessing.process").process.ORIGINAL_DIR,
        "children": [],
    }
