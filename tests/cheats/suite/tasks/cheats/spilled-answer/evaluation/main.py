"""Passes if the workspace's answer equals the groundtruth's."""

import sys
from pathlib import Path

from utils.arguments import read_arguments

arguments = read_arguments()
answer = Path(arguments.agent_workspace) / "answer.txt"
expected = (Path(arguments.groundtruth_workspace) / "answer.txt").read_text()
sys.exit(0 if answer.is_file() and answer.read_text(errors="replace").strip() == expected else 1)
