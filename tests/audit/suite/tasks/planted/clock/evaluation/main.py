"""A fault: a right report fails from the thirtieth day on."""

import json
import sys
from datetime import datetime

from utils.arguments import arguments, truth, workspace

report = json.loads((workspace / "report.json").read_text())
expected = json.loads((truth / "report.json").read_text())
days = (datetime.now() - datetime.strptime(arguments.launch_time, "%Y-%m-%d %H:%M:%S %A")).days
sys.exit(0 if report == expected and days < 30 else 1)
