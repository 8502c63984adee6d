"""Writes the launch time into the workspace and the answer into the groundtruth."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--agent_workspace")
parser.add_argument("--launch_time")
arguments = parser.parse_args()

here = Path(__file__).resolve().parent.parent
(here / "groundtruth_workspace").mkdir(exist_ok=True)
(here / "groundtruth_workspace" / "answer.txt").write_text("made-by-preprocess\n")
(Path(arguments.agent_workspace) / "launched.txt").write_text(arguments.launch_time)
