"""Add up the prices in `prices."""

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()
workspace, truth = Path(arguments.agent_workspace), Path(arguments.groundtruth_workspace)
report = json.loads((workspace / "report.json").read_text())
expected = json.loads((truth / "report.json").read_text())
days = (datetime.now() - datetime.strptime(arguments.launch_time, "%Y-%m-%d %H:%M:%S %A")).days
sys.exit(0 if report == expected and days < 30 else 1)
