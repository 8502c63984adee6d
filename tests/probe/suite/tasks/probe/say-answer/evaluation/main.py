"""Passes if the agent's last message in the log is the correct answer."""

import argparse
import json
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
log = json.loads(Path(parser.parse_args().res_log_file).read_text())
messages = [message.get("content") for message in log["messages"] if message["role"] == "assistant"]
print(messages[-1:])
sys.exit(0 if messages and messages[-1] == "forty-two" else 1)
