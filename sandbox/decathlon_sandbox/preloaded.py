"""Servers that start as forks of a process outside with imported libraries (`plugins.preload.inside`).

With PRELOAD_VARIABLE, the driver has inherited a socket with that number. For each server it sends the
server's name, with one end of a new pair of sockets. Into the other end it has written before, for the fork
alone: the number of arguments, the working folder, the arguments and the environment, separated by zero
bytes, with the three ends of the server's pipes. The fork enters the sandbox, becomes a child of this
process, and sends `started PID`; when it gets a byte, the server runs. It sends `cold REASON` if the server
has to be started as a program; whatever else happens means the same. The driver passes a reason on, for the
log: the server's name, a zero byte and the reply, without a descriptor.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from decathlon_sandbox.event_loop import EventLoop

WAIT_SECONDS = 30.0
"""How long a fork may take. On a machine on which a thousand servers start at once, they wait in a queue."""
MAX_PAYLOAD_BYTES = 1 << 16
_MAX_REPLY_BYTES = 1024
_STARTED = b"started "

Streams = tuple[int, int, int]
OnFork = Callable[[int, Streams], object]
"""Gets the pid, and this process's ends of stdin, stdout and stderr."""


class PreloadedStarts:
    """Asks for forks over the inherited socket."""

    def __init__(self, loop: EventLoop, descriptor: int) -> None:
        self._loop = loop
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        on_fork: OnFork,
        on_cold: Callable[[], object],
    ) -> Callable[[], object]:
        """Ask for a fork; one of the two is called later. Returns what cancels that."""
        texts = [str(len(argv)), cwd, *argv, *(f"{key}={value}" for key, value in env.items())]
        payload = b"\0".join(map(os.fsencode, texts))
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        ours = (pipes[0][1], pipes[1][0], pipes[2][0])
        channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)

        def close() -> None:
            deadline.cancel()
            self._loop.remove(channel.fileno())
            channel.close()

        def fail() -> None:
            close()
            for stream in ours:
                os.close(stream)

        def start_cold() -> None:
            fail()
            on_cold()

        def on_reply() -> None:
            try:
                reply = channel.recv(_MAX_REPLY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                reply = b""
            pid = _pid_of(reply)
            if pid is None:
                if reply:
                    self._say_why(name, reply)
                start_cold()
                return
            # Known before it can end.
            on_fork(pid, ours)
            try:
                channel.send(b"1")
            except OSError:
                pass  # it was killed, which its pipes show
            close()

        deadline = self._loop.call_later(WAIT_SECONDS, start_cold)
        self._loop.add_reader(channel.fileno(), on_reply)
        try:
            if len(payload) <= MAX_PAYLOAD_BYTES and not any("\0" in text for text in texts):
                socket.send_fds(channel, [payload], theirs)
                socket.send_fds(self._socket, [name.encode()[:256]], [end.fileno()])
        except OSError:
            pass  # then the other end is closed too, and this socket has an end
        finally:
            end.close()
            for stream in theirs:
                os.close(stream)
        return fail

    def _say_why(self, name: str, reply: bytes) -> None:
        """Let the log have the reason that a fork gave up for."""
        try:
            self._socket.send(name.encode()[:256] + b"\0" + reply)
        except OSError:
            pass


def _pid_of(reply: bytes) -> int | None:
    """The fork's pid; None if there is none."""
    number = reply[len(_STARTED) :]
    is_pid = reply.startswith(_STARTED) and number.isdigit() and len(number) < 10
    return int(number) if is_pid else None
