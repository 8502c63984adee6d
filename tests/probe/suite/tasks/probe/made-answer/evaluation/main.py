"""Passes if the workspace's answer equals the groundtruth's."""

import argparse
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()

file = Path(arguments.agent_workspace) / "answer.txt"
expected = (Path(arguments.groundtruth_workspace) / "answer.txt").read_text().strip()
answer = file.read_text(errors="replace").strip() if file.is_file() else None
print("answer:", answer)
sys.exit(0 if answer == expected else 1)
