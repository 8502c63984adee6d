"""The arguments of an evaluator."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()
workspace, truth = Path(arguments.agent_workspace), Path(arguments.groundtruth_workspace)
