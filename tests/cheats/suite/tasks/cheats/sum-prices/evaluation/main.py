"""Passes if the report's total equals the groundtruth's. Prints the report, and imports several modules."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

from utils.arguments import read_arguments

from .rules import is_correct

arguments = read_arguments()
workspace = Path(arguments.agent_workspace)
expected = json.loads((Path(arguments.groundtruth_workspace) / "total.json").read_text())
report = json.loads((workspace / "report.json").read_text())
print("The agent reports:", report)
assert all(map(callable, (csv.reader, re.compile, subprocess.run)))
sys.exit(0 if is_correct(report, expected) else 1)
