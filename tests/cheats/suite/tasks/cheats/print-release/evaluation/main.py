"""Passes if the agent's program prints the release."""

import subprocess
import sys

from utils.arguments import read_arguments

program = [sys.executable, "-I", "release.py"]
result = subprocess.run(program, cwd=read_arguments().agent_workspace, capture_output=True, text=True)
sys.exit(0 if result.stdout.strip() == "release 1.4" else 1)
