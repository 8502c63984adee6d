#!/usr/bin/env python3
"""Stands in for mitmdump and its addon, for tests of the server's side: it speaks as in `exchanges.py`.

`counts` of the episode `die` ends it, that of any other says how many sessions were opened. With the
variable FAKE_MITMDUMP=broken it does not start.
"""

import json
import os
import socket
import sys
import threading


def accept(listener: socket.socket) -> None:
    while True:
        connection, sender = listener.accept()
        connection.sendall(f"{sender[1]}\n".encode())
        connection.close()


def send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    if os.environ.get("FAKE_MITMDUMP") == "broken":
        sys.exit("there is something wrong")
    sys.stdin.readline()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for listener in listeners:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    addresses = [listener.getsockname() for listener in listeners]
    send({"listeners": dict(zip(("proxy", "http", "https"), addresses, strict=True)), "authority": "PEM"})
    sessions = 0
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "open" and request["mode"] == "replay":
            send({"id": request["id"], "error": "no such file"})
            continue
        sessions += request["do"] == "open"
        if request.get("episode") == "die" and request["do"] == "counts":
            os._exit(3)
        counts = {"replayed": sessions, "recorded": 0, "passed": 0, "missed": 0}
        send({"id": request["id"], "counts": counts, "problem": "", "missed": {}})


main()
