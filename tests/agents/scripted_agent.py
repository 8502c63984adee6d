"""An agent's program that needs nothing but Python: an MCP client that makes the calls of a script.

    python3 scripted_agent.py WORD...

`solve` plays find-answer; `call` makes one call; `wait` never ends; `fail` exits with status 3; `post URL`
prints what an address answers; `list` prints what it finds on the machine; `daemon` leaves a process behind;
`say TEXT` prints a text; `tools` lists the task's tools; `once FILE` fails if there is no such file, and
makes it; `steal` tries to open the descriptors of the program that has started this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HEADERS = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


class Client:
    """One MCP session."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.headers = dict(HEADERS)
        self.requests = 0
        client = {"name": "scripted", "version": "1"}
        self.instructions = self.request(
            "initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        )["instructions"]
        self.headers["Mcp-Protocol-Version"] = "2025-11-25"

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1  # with an earlier id, it would be that request, sent again
        request = {"jsonrpc": "2.0", "id": self.requests, "method": method, "params": params}
        body = json.dumps(request).encode()
        with urllib.request.urlopen(urllib.request.Request(self.address, body, self.headers)) as response:
            if session := response.headers.get("Mcp-Session-Id"):
                self.headers["Mcp-Session-Id"] = session
            text = response.read().decode()
        data = [line[5:] for line in text.splitlines() if line.startswith("data:")] or [text]
        reply = json.loads(data[-1])
        return reply.get("result") or reply

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return self.request("tools/call", {"name": name, "arguments": arguments})


def answer_of(url: str) -> str:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b"{}", HEADERS), timeout=10) as response:
            return f"{response.status} {response.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code}"
    except OSError as error:
        return f"unreachable {type(error).__name__}"


def stolen_descriptors() -> list[int]:
    """Descriptors of the parent that could be opened, by pidfd_getfd(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    parent = os.pidfd_open(os.getppid())
    return [number for number in range(64) if library.syscall(438, parent, number, 0) >= 0]


def say(*parts: object) -> None:
    sys.stdout.write(" ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


def main(words: list[str]) -> int:
    while words:
        word = words.pop(0)
        if word == "solve":
            client = Client(os.environ["DECATHLON_ADDRESS"])
            names = [tool["name"] for tool in client.request("tools/list", {})["tools"]]
            say("tools", sorted(names), "prompt", client.instructions == os.environ["DECATHLON_PROMPT"])
            client.call("probe__write", path="answer.txt", text="42")
            say(client.call("claim_done", answer="42")["content"][0]["text"])
        elif word == "call":
            client = Client(os.environ["DECATHLON_ADDRESS"])
            say(client.call(words.pop(0)))
        elif word == "wait":
            say("waiting")
            time.sleep(3600)
        elif word == "fail":
            return 3
        elif word == "post":
            say(answer_of(words.pop(0)))
        elif word == "list":
            found = [path for path in map(Path, words) if path.is_dir()]
            say(json.dumps({str(path): sorted(entry.name for entry in path.iterdir()) for path in found}))
            words.clear()
        elif word == "daemon":
            subprocess.Popen(["sleep", words.pop(0)], start_new_session=True)
        elif word == "environment":
            say(json.dumps(dict(os.environ)))
        elif word == "tools":
            names = [
                tool["name"]
                for tool in Client(os.environ["DECATHLON_ADDRESS"]).request("tools/list", {})["tools"]
            ]
            say("tools", sorted(names))
        elif word == "once":
            if not (file := Path(words.pop(0))).exists():
                file.touch()
                say("no key yet")
                return 3
        elif word == "steal":
            say("taken", stolen_descriptors())
        elif word == "say":
            say(words.pop(0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
