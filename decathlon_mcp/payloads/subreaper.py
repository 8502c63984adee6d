"""First process of a sandbox without isolation: runs one command, and ends what that leaves behind.

    python3 -I -S -c SOURCE GO COMMAND...

The command starts when a byte can be read from the descriptor GO: by then, the server has noted this process.
As a child subreaper it adopts every process of the sandbox whose parent ends. So all of them descend from it,
whatever they do to their sessions and environments, and the kernel says so. When the command has ended, it
kills the rest, and ends with the command's exit code, or 128 and the number of the signal. If it is killed
itself, the command gets SIGTERM, on which the driver ends its own descendants.

Runs outside of a sandbox. Standard library only, any Python from 3.10.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 127
END_SECONDS = 5.0
CHILDREN_BYTES = 1 << 20


def main() -> None:
    """Run the command."""
    go, *command = sys.argv[1:]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not os.read(int(go), 1):
        os._exit(NOT_STARTED)  # the server has died
    os.close(int(go))
    own = os.getpid()
    child = os.fork()
    if child == 0:
        execute(libc, own, command)
    null = os.open(os.devnull, os.O_RDWR)
    # The command alone reads and writes these; stderr shows that not all processes have ended.
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.chdir("/")
    code = wait_for(child)
    end_descendants()
    os._exit(code)


def execute(libc: ctypes.CDLL, parent: int, command: list[str]) -> None:
    """Become the command. Never returns."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == parent:
            # This interpreter ignores them, and the command would inherit that.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def wait_for(child: int) -> int:
    """The exit code of the command. Reaps adopted processes meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_descendants() -> None:
    """Kill all descendants and reap them."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        # All are stopped before one is killed: a stopped process cannot start others meanwhile.
        while (new := descendants() - stopped) and time.monotonic() < deadline:
            send(signal.SIGSTOP, new)
            stopped |= new
        send(signal.SIGKILL, stopped)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


def send(number: int, pids: set[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def descendants() -> set[int]:
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        new = set(children(pending.pop())) - found
        found |= new
        pending += new
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        # `pathlib` takes longer to import than all of this program.
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read(CHILDREN_BYTES).split())
    except OSError:
        pass
    return found


if __name__ == "__main__":
    main()
