"""Passes when the agent's last words, in the log, are the right ones."""

import argparse
import json
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
log = json.loads(Path(parser.parse_args().res_log_file).read_text())
words = [message.get("content") for message in log["messages"] if message["role"] == "assistant"]
print(words[-1:])
sys.exit(0 if words and words[-1] == "forty-two" else 1)
