"""The processes of this machine as /proc shows them, and what the kernel can be asked for our own.

Linux. Where /proc is missing every table is empty, and only process groups can be killed.
"""

from __future__ import annotations

import os
import signal

from decathlon_sandbox import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


class Process:
    """One living process: zombies are not."""

    __slots__ = ("parent", "pid", "session")

    def __init__(self, pid: int, parent: int, session: int) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session


def living() -> dict[int, Process]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    processes = (_read(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in processes if process is not None}


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read(4096)
    except OSError:
        return None
    # The name, in parentheses, may hold anything: what follows its last parenthesis is fixed.
    state, parent, _, session = stat[stat.rindex(b")") + 2 :].split(b" ", 4)[:4]
    return None if state in b"ZX" else Process(pid, int(parent), int(session))


def below(root: int, table: dict[int, Process]) -> set[int]:
    """The descendants of `root`, without itself."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    ahead = [root]
    while ahead:
        for pid in children.get(ahead.pop(), ()):
            if pid not in found and pid != root:
                found.add(pid)
                ahead.append(pid)
    return found


def marked(pid: int, mark: str) -> bool:
    """Was `pid` started with `mark` at the beginning of its MARK_VARIABLE?"""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return False
    return (b"\0" + environment).find(f"\0{wire.MARK_VARIABLE}={mark}".encode()) >= 0


def is_of(pid: int, patterns: Iterable[str]) -> bool:
    """Is its command line of one of these patterns? (`wire.FREEZE` says how.)"""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").decode("utf-8", "replace").split("\0")
    except OSError:
        return False
    line, short = " ".join(words), " ".join([os.path.basename(words[0]), *words[1:]])
    return any(_fits(line, pattern) or _fits(short, pattern) for pattern in patterns)


def _fits(text: str, pattern: str) -> bool:
    """`fnmatch` would have to be imported from a file system that is the agent's by now."""
    head, *parts = pattern.split("*")
    if not parts:
        return text == pattern
    if not text.startswith(head):
        return False
    at = len(head)
    for part in parts[:-1]:
        at = text.find(part, at) + len(part)
        if at < len(part):
            return False
    return len(text) - at >= len(parts[-1]) and text.endswith(parts[-1])


def kill(pids: Iterable[int], spared: Iterable[int] = ()) -> None:
    """SIGKILL to them and their process groups, but to those that hold a spared one; what is gone is fine.

    A group lies within a session, and all of ours have their own: it holds nobody else. At once it reaches
    what forks faster than /proc can be read.
    """
    kept = {os.getpgrp(), *map(_group, spared)}
    for pid in pids:
        try:
            group = os.getpgid(pid)
            if group not in kept:
                os.killpg(group, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def harden() -> bool:
    """Close our memory and descriptors to our children, and have orphans come to us; will they?

    The former (PR_SET_DUMPABLE) keeps everybody without CAP_SYS_PTRACE out of /proc/<us>/fd, environ and mem,
    and from attaching. Costs 3 ms for ctypes; without ctypes neither is had, and orphans are found by their
    mark alone. As the first process, which only its own limits can end from inside, keep those too.
    """
    first = os.getpid() == 1
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        prctl = libc.prctl
    except (ImportError, OSError, AttributeError):
        return first
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if first:
        from decathlon_sandbox.seccomp import keep_the_first_process

        keep_the_first_process(libc)
    return prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 or first
