"""Passes if the browser has downloaded the list of teas."""

import argparse
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("res_log_file", "agent_workspace", "groundtruth_workspace", "launch_time"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()

downloaded = Path(arguments.agent_workspace, ".playwright_output", "teas.csv")
expected = Path(arguments.groundtruth_workspace, "teas.csv")
sys.exit(0 if downloaded.is_file() and downloaded.read_bytes() == expected.read_bytes() else 1)
