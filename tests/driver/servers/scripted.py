# ruff: noqa: PTH109, PTH115, PTH208
"""MCP servers that misbehave: `scripted.py BEHAVIOUR TOKEN`. Without the SDK, and without late imports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

BEHAVIOUR = sys.argv[1]
TOOL = {"name": "any", "inputSchema": {}, "x-unknown": {"kept": [1, None]}}


def write(data: str | bytes) -> None:
    data = data.encode() if isinstance(data, str) else data
    while data:
        data = data[os.write(1, data) :]


def reply(number: Any, result: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}) + "\n")


def refuse(number: Any, code: int, message: str) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}) + "\n")


def text(number: Any, words: str) -> None:
    reply(number, {"content": [{"type": "text", "text": words}]})


def notify(method: str, params: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}) + "\n")


def write_stderr(words: str) -> None:
    os.write(2, words.encode())


def daemonise() -> None:
    """Start a daemon: another session, no parent, no pipes, and it ignores SIGTERM."""
    ready, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.write(done, b"!")
            os.closerange(0, 64)
            while True:
                time.sleep(1000)
        os._exit(0)
    os.read(ready, 1)


# tools


def call(number: int, name: str, arguments: dict[str, Any]) -> None:
    if name == "text":
        text(number, arguments["unit"] * arguments["times"])
    elif name == "hang":
        pass
    elif name == "half_utf8":
        write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"\xc3"}]}}\n' % number)
    elif name == "die":
        write_stderr("the last words\n")
        os._exit(3)
    elif name == "die_by_signal":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "flood_stderr":
        for _ in range(arguments["mib"] * 16):
            write_stderr("e" * 65536)
        write_stderr("the end")
        text(number, "flooded")
    elif name == "flood_stdout":
        for _ in range(arguments["mib"] * 16):
            write(b"o" * 65536)
        write("\n")
        text(number, "flooded")
    elif name == "flood_messages":
        for count in range(arguments["times"]):
            notify("notifications/message", {"level": "info", "data": [count, "m" * 1000]})
        text(number, "flooded")
    elif name == "where":
        details = {"environment": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "pid": os.getpid()}
        details["descriptors"] = {
            fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]
        }
        text(number, json.dumps(details))


# the handshake


def initialize(number: int, params: dict[str, Any]) -> None:
    if BEHAVIOUR == "refuses":
        refuse(number, -1, "not today")
        return
    if BEHAVIOUR == "silent":
        write_stderr("thinking\n")
        return
    result: dict[str, Any] = {
        "protocolVersion": params["protocolVersion"],
        "capabilities": {} if BEHAVIOUR == "toolless" else {"tools": {}},
        "serverInfo": {"name": BEHAVIOUR, "version": "0", "x-more": "kept"},
    }
    reply(number, result)


def list_tools(number: int, params: dict[str, Any]) -> None:
    if BEHAVIOUR == "toolless":
        refuse(number, -32601, "no")
    elif BEHAVIOUR == "paged":
        page = int(params.get("cursor", "0"))
        more = {"nextCursor": str(page + 1)} if page < 4 else {}
        reply(number, {"tools": [{**TOOL, "name": f"tool{page}"}], **more})
    elif BEHAVIOUR == "endless":
        reply(number, {"tools": [], "nextCursor": str(number)})
    else:
        reply(number, {"tools": [TOOL]})


def begin() -> None:
    if BEHAVIOUR == "dies":
        write_stderr("no such luck\n")
        os._exit(7)
    if BEHAVIOUR == "noisy":
        write(
            b"Welcome!\n\n\x1b[1mbold\x1b[0m\n{'port': 1}\n{not json\n[1, 2]\n\"text\"\nnull\n\xff\xfe\x00\n"
        )
        write(json.dumps({"level": "info", "id": 1, "msg": "starting"}) + "\n")
    if BEHAVIOUR == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if BEHAVIOUR == "daemonic":
        daemonise()
    if BEHAVIOUR == "orphaned":
        if os.fork() != 0:
            os._exit(0)
        time.sleep(1000)  # the child holds the pipes


def main() -> None:
    begin()
    for line in sys.stdin:
        message = json.loads(line)
        method, number, params = message.get("method"), message.get("id"), message.get("params", {})
        if method == "initialize":
            initialize(number, params)
        elif method == "notifications/initialized" and BEHAVIOUR == "deaf":
            reply(json.loads(sys.stdin.readline())["id"], {"tools": [TOOL]})
            time.sleep(1000)
        elif method == "tools/list":
            list_tools(number, params)
        elif method == "tools/call":
            call(number, params["name"], params.get("arguments", {}))
        elif method == "notifications/cancelled":
            notify("notifications/message", {"level": "info", "data": {"cancelled": params}})
    if BEHAVIOUR == "stubborn":
        time.sleep(1000)


main()
