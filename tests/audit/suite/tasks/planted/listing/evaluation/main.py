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
report = json.loads(next(path for path in workspace.iterdir() if path.suffix == ".json").read_text())
expected = json.loads((truth / "report.json").read_text())
sys.exit(0 if report == expected else 1)
