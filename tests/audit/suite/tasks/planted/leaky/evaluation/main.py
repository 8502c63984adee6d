"""Write into `answer."""

import argparse
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()
workspace, truth = Path(arguments.agent_workspace), Path(arguments.groundtruth_workspace)
answer = (workspace / "answer.txt").read_text()
sys.exit(0 if answer.strip() == (truth / "answer.txt").read_text().strip() else 1)
