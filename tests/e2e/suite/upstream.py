"""Runs the task's programs as upstream's main.py does in its container, and prints their states as JSON.

Preprocess and evaluator are shell commands with pipes for their output; the server has the session, the
pipes and the six variables that the MCP SDK's stdio client gives it.
"""

import base64
import json
import os
import subprocess
import zlib

VARIABLES = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")


def run(module):
    command = (
        f"python3 -m tasks.fidelity.state.{module}.main --agent_workspace $PWD/workspace --launch_time now"
    )
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


def call_server():
    server = subprocess.Popen(
        ["python3", "local_servers/probe_server.py", "workspace"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "states"}}
    output, _ = server.communicate(json.dumps(request) + "\n")
    return json.loads(json.loads(output)["result"]["content"][0]["text"])


os.makedirs("workspace", exist_ok=True)
run("preprocess")
states = call_server()
states["evaluator"] = json.loads(zlib.decompress(base64.b64decode(run("evaluation"))))
print(json.dumps(states))
