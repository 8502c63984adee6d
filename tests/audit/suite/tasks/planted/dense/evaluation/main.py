"""Passes if the agent has written all files, whatever they contain."""

import sys

from utils.arguments import workspace

sys.exit(0 if all((workspace / f"{name}.txt").is_file() for name in ("north", "south", "east")) else 1)
