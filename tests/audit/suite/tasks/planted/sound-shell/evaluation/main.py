"""Passes if the report has the right sum."""

import json
import sys

from utils.arguments import truth, workspace

report = json.loads((workspace / "report.json").read_text())
expected = json.loads((truth / "report.json").read_text())
sys.exit(0 if report == expected else 1)
