"""An MCP server in nothing but the standard library: a root shell, and a Python that has ctypes."""

import json
import subprocess
import sys
import tempfile
import threading

MOST_BYTES = 1 << 20
TEXT = {"type": "string"}


def tool(name, argument, description):
    schema = {"type": "object", "properties": {argument: TEXT}, "required": [argument]}
    return {"name": name, "description": description, "inputSchema": schema}


TOOLS = [
    tool("shell", "command", "Run a command with bash in the workspace."),
    tool("python", "code", "Run a Python program in the workspace."),
    tool("say", "text", "Say something."),
]
PROGRAMS = {"shell": ["bash", "-s"], "python": ["python3", "-"]}

lock = threading.Lock()


def send(message):
    with lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def run(program, script):
    # Not a pipe: a daemon would hold its other end open.
    with tempfile.TemporaryFile() as said:
        subprocess.run(program, input=script.encode(), stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        return said.read(MOST_BYTES).decode(errors="replace")


def call(message):
    (argument,) = message["params"]["arguments"].values()
    program = PROGRAMS.get(message["params"]["name"])
    try:
        said = argument if program is None else run(program, argument)
    except OSError as error:
        said = f"OSError: {error}"
    send({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": said}]}})


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
