"""Passes when the agent's program ends well; waits for it, as evaluators do, for as long as it takes."""

import subprocess
import sys

from utils.arguments import read_arguments

done = subprocess.run([sys.executable, "-I", "loop.py"], cwd=read_arguments().agent_workspace)
sys.exit(0 if done.returncode == 0 else 1)
