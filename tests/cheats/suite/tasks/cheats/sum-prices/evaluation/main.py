"""Passes when the report's total is the groundtruth's. Imports this and that, and says what it was told."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

from utils.arguments import read_arguments

from .rules import is_right

arguments = read_arguments()
workspace = Path(arguments.agent_workspace)
wanted = json.loads((Path(arguments.groundtruth_workspace) / "total.json").read_text())
report = json.loads((workspace / "report.json").read_text())
print("The agent reports:", report)
assert all(map(callable, (csv.reader, re.compile, subprocess.run)))
sys.exit(0 if is_right(report, wanted) else 1)
