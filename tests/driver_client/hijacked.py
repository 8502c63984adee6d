"""A driver that an agent has taken over: it speaks the wire, attaches, and lies. Runs inside a sandbox.

Its argument is the name of a function below.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

from decathlon_sandbox import wire
from decathlon_sandbox.lines import Control, Lines, attached_line, refused_line

LINES = Lines(wire.MAX_LINE_BYTES)
ATTACHED: list[Control] = []


def write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def send(*bodies: bytes) -> None:
    write(b"".join(map(LINES.frame, bodies)))


def message(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **members}, separators=(",", ":")).encode()


def reply(request: dict[str, Any], rest: bytes = b'"result":{}}') -> bytes:
    return b'{"jsonrpc":"2.0","id":%d,%b' % (request["id"], rest)


def requests() -> Any:
    """What the server asks. Each attachment is answered."""
    while data := os.read(0, 1 << 16):
        for line in LINES.receive(data):
            if not isinstance(line, Control):
                if line.startswith(b"{"):
                    yield json.loads(line)
                elif line.startswith(b"pending "):
                    send(*[reply({"id": int(number)}) for number in line.split()[1:]])
            elif line.kind == b"attach":
                ATTACHED.append(line)
                LINES.begin_reading(line.nonce)
                LINES.begin_writing(line.nonce)
                write(attached_line(line.nonce, wire.VERSION))


def serve(first: bytes = b"") -> None:
    """Answer everything, after a lie before each answer."""
    for request in requests():
        if "id" in request:
            send(*[first] * bool(first), reply(request))


def never_ends_a_line() -> None:
    next(requests())
    while True:
        write(b"x" * (1 << 16))


def reads_nothing() -> None:
    """Guesses the ids of all pings, and answers requests that nobody made."""
    generation = next(requests())["id"] >> wire.COUNTER_BITS
    while True:
        send(*[reply({"id": (generation << wire.COUNTER_BITS) + number}) for number in range(1, 400)])
        send(*[reply({"id": 10**17 + number}) for number in range(10_000)])


def answers_what_was_not_asked() -> None:
    ids = (0, -1, 1.5, "1", True, [1], {"id": 1}, 10**17, 10**30)
    for request in requests():
        if "id" in request:
            for number in (*ids, request["id"] + 1, request["id"] - 1):
                send(message(id=number, result="forged"), message(id=number, error={"code": 1}))
            send(b"garbage", b"\xff", b"[]", b'{"id":', b'{"method":7,"params":[]}', b'{"id":{},"method":[]}')
            send(reply(request), reply(request, b'"result":"forged"}'), reply(request, b'"error":{}}'))


def has_never_received_anything() -> None:
    """Asks for requests that were not made, and again for each that was."""
    for request in requests():
        send(b"unknown " + b"1 " * 100_000 + b"%d" % request["id"])


def demands_attachments() -> None:
    serve(b"lost")


def replies_are_deep_or_wide() -> None:
    lies = (
        b"[" * 100_000,
        b"[" + b"[]," * 1_000_000 + b"0]}",
        b'{"a":' * 100_000,
        b"NaN}",
        b"9" * 100_000 + b"}",
    )
    for request, lie in zip(requests(), itertools.cycle(lies), strict=False):
        if request.get("method") == wire.PING:
            send(reply(request, b'"result":' + lie))
        elif "id" in request:
            send(reply(request))


def floods_with_notifications() -> None:
    request = next(requests())
    many = [
        message(
            method=method, params={"id": request["id"], "server": "files", "params": {"data": "x" * size}}
        )
        for method in (wire.PROGRESS, wire.MESSAGE, wire.CHANGED, wire.OPENED, wire.DATA, "ready")
        for size in (1, 100_000)
    ]
    for _ in range(50):
        send(*many)
    send(reply(request))
    serve()


def refuses_the_server() -> None:
    """It goes on: whether it runs is what decides whose fault the loss is."""
    for _ in requests():
        write(refused_line(ATTACHED[-1].nonce, 10**17))


def packs_files_for_other_folders() -> None:
    """Its archive has a name that leads out of the folder in which it is unpacked."""
    import base64
    import io
    import tarfile

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../escaped"))
    tar = base64.b64encode(packed.getvalue()).decode()
    for request in requests():
        if "id" in request:
            send(message(id=request["id"], result={"tar": tar}))


def main() -> None:
    size = b""
    while not size.endswith(b"\n"):
        size += os.read(0, 1)
    remaining = int(size)
    while remaining:
        remaining -= len(os.read(0, remaining))
    globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()
