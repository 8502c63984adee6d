"""Passes if the agent has written a program, correct or not."""

import sys
from pathlib import Path

from utils.arguments import read_arguments

sys.exit(0 if (Path(read_arguments().agent_workspace) / "double.py").is_file() else 1)
