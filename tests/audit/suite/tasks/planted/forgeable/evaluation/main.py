"""Add up the prices in `prices."""

import argparse
import json
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()
workspace, truth = Path(arguments.agent_workspace), Path(arguments.groundtruth_workspace)
verdict = json.loads((workspace / "verdict.json").read_text())
sys.exit(0 if verdict.get("pass") else 1)
