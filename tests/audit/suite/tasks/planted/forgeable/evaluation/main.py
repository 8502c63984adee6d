"""A fault: reads the result from a file of the workspace."""

import json
import sys

from utils.arguments import workspace

verdict = json.loads((workspace / "verdict.json").read_text())
sys.exit(0 if verdict.get("pass") else 1)
