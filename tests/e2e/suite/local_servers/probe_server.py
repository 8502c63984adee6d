"""An MCP server whose one tool returns the states of preprocess, of the server, and of a child of it."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from utils import inherited_state


def states():
    child = subprocess.run(
        [sys.executable, inherited_state.__file__], capture_output=True, text=True, check=True
    )
    return {
        "preprocess": json.loads(Path(sys.argv[1], "preprocess.json").read_text()),
        "server": inherited_state.state(),
        "server's child": json.loads(child.stdout),
    }


def answer(method, params):
    if method == "initialize":
        info = {"name": "probe", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": info,
        }
    if method == "tools/list":
        return {"tools": [{"name": "states", "inputSchema": {"type": "object"}}]}
    return {"content": [{"type": "text", "text": json.dumps(states())}]}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
