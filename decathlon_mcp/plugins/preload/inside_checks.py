"""Checks of libraries for `inside`: what they do when they are imported that a fork would not do again.

A module beside `sitecustomize` in an interpreter that only checks. Standard library only, CPython 3.10 or
later, Linux.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

HARMLESS = ("opentelemetry.context", "multiprocessing.process", "rich")
"""Modules that ask for what is not the same in a fork, and need not: the first makes names of variables
within a process of random numbers, and the others are made up to date in `inside.refresh`."""
HELPERS = (
    *("os", "posixpath", "genericpath", "pathlib", "random", "secrets", "uuid"),
    *("collections.abc", "_collections_abc"),
)
"""Modules that do what others ask for."""
EFFECTS = (
    *("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "os.putenv"),
    *("os.unsetenv", "signal.pthread_kill", "_thread.start_new_thread"),
)
"""Beginnings of audit events of what no library may do when it is imported."""


def check(
    control: Any,
    libraries: list[str],
    imported: Callable[[str], bool],
    problem_of_process: Callable[[set[int]], str | None],
) -> NoReturn:
    """Import as `inside.run` does, and report what the libraries did meanwhile. Never returns."""
    import json

    watch = Watch()
    os.environ.__class__ = watch.environment()
    real_random, real_folder, os.urandom, os.getcwd = os.urandom, os.getcwd, watch.urandom, watch.getcwd
    if "random" in sys.modules:
        module: Any = sys.modules["random"]
        module._urandom = watch.urandom
    watch.real = real_random, real_folder
    sys.addaudithook(watch.audit)
    before = {int(name) for name in os.listdir("/proc/self/fd")}
    unsafe: dict[str, str] = {}
    sys.dont_write_bytecode = True
    for name in libraries:
        if not imported(name):
            watch.problem = "cannot be imported"
        reason = watch.problem or problem_of_process(before)
        if reason:
            unsafe[name] = reason
            break
    watch.active = False
    reads = sorted(name for name in watch.reads if name != "PYTHONPATH")
    control.send(json.dumps({"unsafe": unsafe, "reads": reads[:500]}).encode()[:60000])
    os._exit(0)


class Watch:
    """Notes what libraries do while they are imported that would not be the same in a fork."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.problem: str | None = None
        self.active = True
        self.real: Any = ()

    def environment(self) -> type:
        watch = self

        class Recorded(type(os.environ)):
            def __getitem__(self, key: str) -> str:
                watch.reads.add(str(key))
                return super().__getitem__(key)

            def __iter__(self) -> Any:
                watch.note("reads the whole environment")
                return super().__iter__()

        return Recorded

    def note(self, problem: str) -> None:
        if self.active and self.problem is None:
            frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  (`inspect` imports too much)
            while frame.f_globals.get("__name__") in HELPERS and frame.f_back:
                frame = frame.f_back
            module = frame.f_globals.get("__name__")
            if module not in HARMLESS:
                self.problem = f"{problem} ({module})"

    def urandom(self, size: int) -> bytes:
        self.note("draws random numbers")
        return self.real[0](size)

    def getcwd(self) -> str:
        self.note("asks for the working folder")
        return self.real[1]()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.note(f"writes {path}")
            elif isinstance(path, str) and not path.startswith(
                ("/usr/", "/etc/", "/proc/", sys.prefix, sys.base_prefix, "/dev/null", "/lib")
            ):
                self.note(f"reads {path}")
        elif event.startswith(EFFECTS) and event != "socket.__new__":
            self.note(f"does {event}")
