"""MCP server with a root shell and a Python that has ctypes. It uses only the standard library."""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

MAX_OUTPUT_BYTES = 1 << 20
TEXT = {"type": "string"}


def tool(name, argument, description):
    schema = {"type": "object", "properties": {argument: TEXT}, "required": [argument]}
    return {"name": name, "description": description, "inputSchema": schema}


TOOLS = [
    tool("shell", "command", "Run a command with bash in the workspace."),
    tool("python", "code", "Run a Python program in the workspace."),
    tool("say", "text", "Return the text."),
    tool("reply", "members", "Reply with these members, the value of a Python expression for JSON text."),
]
DEFINITIONS = Path(__file__).with_name("definitions.json")
if DEFINITIONS.exists():  # a test's own
    TOOLS += json.loads(DEFINITIONS.read_text())
PROGRAMS = {"shell": ["bash", "-s"], "python": ["python3", "-"]}

lock = threading.Lock()


def send(message):
    with lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def run(program, script):
    # A file and not a pipe, because a daemon would keep the other end of a pipe open.
    with tempfile.TemporaryFile() as output:
        subprocess.run(program, input=script.encode(), stdout=output, stderr=subprocess.STDOUT)
        output.seek(0)
        return output.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def call(message):
    (argument,) = message["params"]["arguments"].values()
    program = PROGRAMS.get(message["params"]["name"])
    if message["params"]["name"] == "reply":
        with lock:
            members = eval(argument)  # noqa: S307
            sys.stdout.write('{"jsonrpc": "2.0", "id": %d, %s}\n' % (message["id"], members))
            sys.stdout.flush()
        return
    try:
        text = argument if program is None else run(program, argument)
    except OSError as error:
        text = f"OSError: {error}"
    send({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": text}]}})


for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "root", "version": "1"},
            }
            send({"jsonrpc": "2.0", "id": message["id"], "result": result})
        case "tools/list":
            send({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": TOOLS}})
        case "tools/call":
            threading.Thread(target=call, args=(message,), daemon=True).start()
