"""Starts an agent's program, and ends with it and with everything that it has started; and opens its sockets.

    python3 -I -S -c SOURCE DESCRIPTOR
    python3 -I -S -c SOURCE DESCRIPTOR '[[ADDRESS, PORT], ...]'

The first form sends a byte through the socket with this descriptor, and reads an order from it, one line of
JSON: `{"files": {PATH: TEXT}, "command": [...], "folder": DIR, "environment": {...}, "remove": DIR or null}`.
Writes the files, then sends `STARTING` and runs the program, or `FAILED` if it cannot be started. When the
socket is closed at the other end, it kills the program. At the end it kills what the program has left
running, and removes a folder if the order names one. Its exit status is the program's, 128 plus the number of
a signal, or 127 if the program cannot be started.

The second form opens listening sockets in the network that it is started in, whose loopback interface gets
the addresses that it lacks, and sends them in one message. It runs outside of a sandbox, as a user who may
change its network. Standard library only, any Python from 3.10.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

STARTING, FAILED = b"2", b"3"
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
SIOCSIFADDR = 0x8916
REAP_SECONDS = 1.0
"""How often processes without a parent are reaped."""


def main() -> int:
    """Send the sockets, or read and carry out the order; return the exit status."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    if len(sys.argv) > 2:
        listeners = [
            listen(address, port, alias) for alias, (address, port) in enumerate(json.loads(sys.argv[2]))
        ]
        socket.send_fds(channel, [b"1"], [listener.fileno() for listener in listeners])
        return 0
    channel.set_inheritable(False)
    library = ctypes.CDLL(None)
    # Whatever the program leaves behind becomes a child of this process.
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The program, which has the same user, cannot take the socket's descriptor to say that it never started.
    library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    channel.send(b"1")
    order = json.loads(channel.makefile("rb").readline() or "null")
    if order is None:
        return 1  # the other process has ended
    try:
        return run(order, channel)
    finally:
        if order["remove"]:
            shutil.rmtree(order["remove"], ignore_errors=True)


def run(order: dict[str, Any], channel: socket.socket) -> int:
    """Prepare and run the program; return the exit status."""
    for path, text in order["files"].items():
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(path).write_text(text, "utf-8")
    Path(order["folder"]).mkdir(mode=0o700, parents=True, exist_ok=True)
    channel.send(STARTING)
    try:
        program = subprocess.Popen(
            order["command"],
            cwd=order["folder"],
            env=order["environment"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        channel.send(FAILED)
        sys.stderr.write(f"{order['command'][0]} cannot be started: {error.strerror}\n")
        return 127
    try:
        return wait(program.pid, channel)
    finally:
        kill_children()


def wait(program: int, channel: socket.socket) -> int:
    """Wait for the end of the program, or of the process at the other end; the exit status."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(os.pidfd_open(program), select.POLLIN)
    while True:
        events = poll.poll(REAP_SECONDS * 1000)
        while (ended := reap()) is not None:
            if ended[0] == program:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
        if any(descriptor == channel.fileno() for descriptor, _ in events):
            return 128 + signal.SIGKILL


def reap() -> tuple[int, int] | None:
    """A child that has ended, and its status."""
    try:
        ended, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (ended, status) if ended else None


def kill_children() -> None:
    """Kill all children, and theirs, which become this process's."""
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """The numbers of this process's children that can be killed."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text("latin-1").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(os.getpid()):
                found.append(int(folder.name))
    return found


def listen(address: str, port: int, alias: int) -> socket.socket:
    """A listening socket at an IPv4 address."""
    if not address.startswith("127."):
        name, value = f"lo:{alias}".encode(), socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = struct.pack("16sH2s4s8s", name, socket.AF_INET, b"", value, b"")
            fcntl.ioctl(control, SIOCSIFADDR, request)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    return listener


if __name__ == "__main__":
    sys.exit(main())
