"""MCP server with tools for tests. It uses only the standard library, so that it starts quickly."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

WORKSPACE = sys.argv[1]
TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def tool(name, description, **properties):
    return {
        "name": name,
        "description": description,
        "inputSchema": {"type": "object", "properties": properties},
    }


TOOLS = [
    tool("echo", "Return the text.", text=TEXT),
    tool("write", "Write a file in the workspace.", path=TEXT, text=TEXT),
    tool("read", "Read a file by its path in the workspace or its absolute path.", path=TEXT),
    tool("shell", "Run a shell command in the workspace.", command=TEXT),
    tool("count", "Count to a number, reporting progress.", to=NUMBER, pause=NUMBER),
    tool("sleep", "Sleep; if cancelled, append the note to cancelled.txt.", seconds=NUMBER, note=TEXT),
    tool("talk", "Send log messages at every level."),
    tool("fail", "Return a tool error."),
    tool("refuse", "Return a JSON-RPC error."),
    tool("odd", "Return fields and content types that MCP does not define."),
    tool("big", "Return a text with this number of characters.", characters=NUMBER),
    tool("garbage", "Write a line that is not JSON before the result."),
    tool("die", "End the server without a reply."),
    tool("learn", "Add the tool `learned` to this server's list.", text=TEXT),
    {"name": "bare", "description": "A tool with an empty schema.", "inputSchema": {}},
]

LEARNED = tool("learned", "A tool that was not listed at first.")

lock = threading.Lock()
cancelled = {}


def send(message):
    line = json.dumps(message, ensure_ascii=False)
    with lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def notify(method, **params):
    send({"jsonrpc": "2.0", "method": method, "params": params})


def text(value, **fields):
    return {"content": [{"type": "text", "text": value}], **fields}


def workspace_path(path):
    return os.path.join(WORKSPACE, path)


def count(arguments, meta):
    to = int(arguments["to"])
    for number in range(1, to + 1):
        if "progressToken" in meta:
            notify(
                "notifications/progress",
                progressToken=meta["progressToken"],
                progress=number,
                total=to,
                message=arguments.get("message", f"at {number}"),
            )
        time.sleep(arguments.get("pause", 0))
    return text(f"counted to {to}")


def sleep(arguments, stop):
    if stop.wait(arguments["seconds"]):
        with open(workspace_path("cancelled.txt"), "a") as notes:
            notes.write(arguments.get("note", "") + "\n")
        return None
    return text("slept")


def talk():
    for level in ("debug", "info", "warning", "error"):
        notify("notifications/message", level=level, logger="probe", data={"level": level})
    return text("talked")


def learn():
    if LEARNED not in TOOLS:
        TOOLS.append(LEARNED)
    notify("notifications/tools/list_changed")
    return text("learned it")


def shell(command):
    result = subprocess.run(
        command, shell=True, cwd=WORKSPACE, capture_output=True, text=True, errors="replace"
    )
    return text(result.stdout + result.stderr, structuredContent={"exit_code": result.returncode})


def odd():
    return {
        "content": [
            {"type": "text", "text": "a hologram", "depth": 3, "frames": [1, 2]},
            {"type": "text", "text": "seen", "colour": "blue"},
        ],
        "structuredContent": {"deep": [{"er": None}]},
        "isError": False,
        "mood": "cheerful",
        "_meta": {"probe/trace": "t-1"},
    }


def call(name, arguments, meta, stop):
    match name:
        case "echo":
            return text(arguments["text"])
        case "write":
            path = workspace_path(arguments["path"])
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(arguments["text"])
            return text("written")
        case "read":
            with open(workspace_path(arguments["path"])) as file:
                return text(file.read())
        case "shell":
            return shell(arguments["command"])
        case "count":
            return count(arguments, meta)
        case "sleep":
            return sleep(arguments, stop)
        case "talk":
            return talk()
        case "fail":
            return text("it did not work", isError=True)
        case "odd":
            return odd()
        case "big":
            return text("x" * int(arguments["characters"]))
        case "garbage":
            with lock:
                sys.stdout.write('{"jsonrpc": "2.0", "id": \n\x00not json at all\n')
                sys.stdout.flush()
            return text("after the garbage")
        case "die":
            sys.stderr.write("probe: killed by its tool die\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "bare":
            return text("bare")
        case "learn":
            return learn()
        case "learned":
            return text("called")
    raise LookupError(name)


def serve(message, stop):
    params = message["params"]
    try:
        if params["name"] == "refuse":
            error = {"code": -31999, "message": "not today", "data": {"again": "tomorrow"}}
            send({"jsonrpc": "2.0", "id": message["id"], "error": error})
            return
        result = call(params["name"], params.get("arguments") or {}, params.get("_meta") or {}, stop)
    except Exception as error:
        result = text(f"{type(error).__name__}: {error}", isError=True)
    if result is not None:
        send({"jsonrpc": "2.0", "id": message["id"], "result": result})


def main():
    for line in sys.stdin:
        message = json.loads(line)
        match message.get("method"):
            case "initialize":
                result = {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {}, "logging": {}},
                    "serverInfo": {"name": "probe", "version": "1"},
                }
                send({"jsonrpc": "2.0", "id": message["id"], "result": result})
            case "tools/list":
                send({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": TOOLS}})
            case "tools/call":
                stop = cancelled[message["id"]] = threading.Event()
                threading.Thread(target=serve, args=(message, stop), daemon=True).start()
            case "notifications/cancelled":
                cancelled[message["params"]["requestId"]].set()
            case method if "id" in message:
                error = {"code": -32601, "message": f"no {method}"}
                send({"jsonrpc": "2.0", "id": message["id"], "error": error})


main()
