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

TOKEN = "token"
opened = 0


def accept(listener: socket.socket) -> None:
    global opened
    while True:
        connection, _ = listener.accept()
        token, _, line = connection.makefile().readline().partition(" ")
        request = json.loads(line)
        assert token == TOKEN
        opened += request["do"] == "open"
        if request.get("episode") == "die" and request["do"] == "counts":
            os._exit(3)
        counts = {"replayed": opened, "recorded": 0, "passed": 0, "missed": 0}
        connection.sendall(json.dumps({"counts": counts, "problem": ""}).encode() + b"\n")
        connection.close()


def main() -> None:
    if os.environ.get("FAKE_MITMDUMP") == "broken":
        sys.exit("there is something wrong")
    sys.stdin.readline()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    ready = {"listeners": {"proxy": listener.getsockname()}, "authority": "PEM", "token": TOKEN}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


main()
