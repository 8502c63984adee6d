"""Server process of a test: makes calls over a container's attached stream and logs them in a file.

`python -m tests.driver.resumable_attacher SOCKET CONTAINER STORE CALLS BOOT_FILE`. It can be killed at any
moment; the next process continues from the store. Prints `attached` and, when CALLS calls have their replies,
`done`. Exit code 3: another process has taken the connection over.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from decathlon_sandbox.resumable import ACKNOWLEDGE_AFTER_SECONDS, ServerEnd

from tests.driver.resumable_container import LIMITS

AT_ONCE = 12
ATTACH_AGAIN_SECONDS = 0.3
TAKEN_OVER_EXIT = 3
_HEADER_BYTES = 8
_STDOUT = 1


class Store:
    """A file with one JSON object a line: `call` or `reply`, and `payload`.

    `call` is a call's serial number, `reply` the number of the driver's message.

    Next to it is a file with the generation of the last process that called `begin`. Processes before that
    one cannot write any more.
    """

    def __init__(self, path: Path) -> None:
        self.calls: dict[int, Any] = {}
        self.replies: dict[int, Any] = {}
        self.answered: set[int] = set()
        """Serial numbers of the calls that have a reply."""
        self.generation = 0
        self._path = path
        self._fd = -1
        self._generation_fd = -1

    def begin(self) -> None:
        """Read the store, and continue it with the next generation."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._generation_fd = os.open(f"{self._path}.generation", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.generation = int(os.pread(self._generation_fd, 20, 0) or b"0") + 1
        os.pwrite(self._generation_fd, b"%020d" % self.generation, 0)
        self.read()
        os.write(self._fd, b"\n")
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> None:
        for line in self._path.read_bytes().split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote this line
            if "call" in entry:
                assert entry["call"] not in self.calls
                self.calls[entry["call"]] = entry["payload"]
            else:
                self._keep_reply(entry["reply"], entry["payload"])

    def add_call(self, call: Any) -> None:
        self._write({"call": call["serial"], "payload": call})
        self.calls[call["serial"]] = call

    def add_reply(self, number: int, reply: Any) -> None:
        self._write({"reply": number, "payload": reply})
        self._keep_reply(number, reply)

    def _keep_reply(self, number: int, reply: Any) -> None:
        assert self.replies.setdefault(number, reply) == reply
        self.answered.add(reply["call"]["serial"])

    def _write(self, entry: dict[str, Any]) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        if int(os.pread(self._generation_fd, 20, 0)) != self.generation:
            sys.exit(TAKEN_OVER_EXIT)
        os.write(self._fd, json.dumps(entry).encode() + b"\n")
        fcntl.flock(self._fd, fcntl.LOCK_UN)


def attach(path: str, container: str) -> socket.socket:
    """Attach to a container's streams (Docker Engine API)."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    query = "stream=1&stdin=1&stdout=1&stderr=1"
    connection.sendall(
        f"POST /containers/{container}/attach?{query} HTTP/1.1\r\nHost: docker\r\n"
        "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, head
        head += byte
    assert b" 101 " in head.split(b"\r\n")[0], head
    return connection


def stdout_of(frames: bytearray) -> bytes:
    """Remove whole frames and return what was written to stdout."""
    stdout = b""
    while len(frames) >= _HEADER_BYTES:
        end = _HEADER_BYTES + int.from_bytes(frames[4:_HEADER_BYTES], "big")
        if len(frames) < end:
            break
        if frames[0] == _STDOUT:
            stdout += frames[_HEADER_BYTES:end]
        else:
            sys.stderr.buffer.write(frames[_HEADER_BYTES:end])
        del frames[:end]
    return stdout


def main() -> int:
    path, container, store_path, total = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    is_first = not store_path.exists()
    connection = attach(path, container)
    store = Store(store_path)
    store.begin()
    unsent = [call for serial, call in store.calls.items() if serial not in store.answered]
    end = ServerEnd(LIMITS, generation=store.generation, survive_seconds=60, taken_back=not is_first)
    if is_first:
        connection.sendall(Path(sys.argv[5]).read_bytes())
    frames, output, attached_at, was_attached = bytearray(), b"", 0.0, False
    connection.setblocking(False)
    while end.failure is None:
        now = time.monotonic()
        if (not end.attached or end.attach_due) and now > attached_at + ATTACH_AGAIN_SECONDS:
            # In the middle of a line, for which the driver gets a line feed first.
            attached_at, output = now, b""
            end.attach(os.urandom(16).hex())
        if end.attached and not was_attached:
            was_attached = True
            print("attached", flush=True)  # noqa: T201
        while end.attached and unsent:
            payload = json.dumps(unsent[0]).encode()
            if len(payload) > end.room_bytes:
                break
            end.send(payload)
            del unsent[0]
        while end.attached and not unsent and len(store.calls) < min(total, len(store.answered) + AT_ONCE):
            serial = len(store.calls)
            call = {"serial": serial, "text": "ä" * (serial * 37 % 4000)}
            payload = json.dumps(call).encode()
            if len(payload) > end.room_bytes:
                break
            store.add_call(call)
            end.send(payload)
        if len(store.answered) == total and not end.acknowledgement_pending and not output:
            print("done", flush=True)  # noqa: T201
            return 0
        output = output or end.data_to_send()
        wanted = [connection] if output else []
        readable, writable, _ = select.select([connection], wanted, [], ACKNOWLEDGE_AFTER_SECONDS)
        if readable:
            data = connection.recv(65536)
            assert data, "the container has ended"
            frames += data
            for number, payload in end.receive(stdout_of(frames)):
                store.add_reply(number, json.loads(payload))
                end.acknowledge(number)
        if writable:
            output = output[connection.send(output) :]
        if not readable and not writable:
            end.acknowledge_now()
    print(end.failure, file=sys.stderr)  # noqa: T201
    return TAKEN_OVER_EXIT if "taken it over" in end.failure else 1


if __name__ == "__main__":
    sys.exit(main())
