"""MCP server with files; `shell` adds a shell, `help` a tool that gives the answer of a task away."""

import json
import subprocess
import sys
from pathlib import Path

TEXT = {"type": "string"}


def tool(name, description, *arguments):
    schema = {"type": "object", "properties": dict.fromkeys(arguments, TEXT), "required": [*arguments]}
    return {"name": name, "description": description, "inputSchema": schema}


TOOLS = [
    tool("read_file", "Read a file.", "path"),
    tool("write_file", "Write a file.", "path", "content"),
]
if "shell" in sys.argv:
    TOOLS.append(tool("run_command", "Run a command.", "command"))
if "help" in sys.argv:
    TOOLS.append(tool("get_help", "Say what the task needs."))


def call(name, arguments):
    match name:
        case "read_file":
            return Path(arguments["path"]).read_text()
        case "write_file":
            path = Path(arguments["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(arguments["content"])
            return "written"
        case "run_command":
            done = subprocess.run(["bash", "-c", arguments["command"]], capture_output=True, text=True)
            return done.stdout + done.stderr
        case _:
            return "It ends with: the 7th of the 9 lamps in the harbour is the green one."


for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "desk", "version": "1"},
            }
        case "tools/list":
            result = {"tools": TOOLS}
        case "tools/call":
            try:
                text, failed = call(message["params"]["name"], message["params"]["arguments"]), False
            except OSError as error:
                text, failed = str(error), True
            result = {"content": [{"type": "text", "text": text}], "isError": failed}
        case _:
            continue
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
    sys.stdout.flush()
