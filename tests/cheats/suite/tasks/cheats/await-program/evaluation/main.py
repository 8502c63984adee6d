"""Passes if the agent's program exits with 0. Waits for it without a time limit, as many evaluators do."""

import subprocess
import sys

from utils.arguments import read_arguments

result = subprocess.run([sys.executable, "-I", "loop.py"], cwd=read_arguments().agent_workspace)
sys.exit(0 if result.returncode == 0 else 1)
