"""Passes when the workspace's answer is the groundtruth's."""

import argparse
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()

answer = Path(arguments.agent_workspace) / "answer.txt"
wanted = (Path(arguments.groundtruth_workspace) / "answer.txt").read_text().strip()
given = answer.read_text(errors="replace").strip() if answer.is_file() else None
print("given", given)
sys.exit(0 if given == wanted else 1)
