"""A fault: reads whichever JSON file its folder lists first."""

import json
import sys

from utils.arguments import truth, workspace

report = json.loads(next(path for path in workspace.iterdir() if path.suffix == ".json").read_text())
expected = json.loads((truth / "report.json").read_text())
sys.exit(0 if report == expected else 1)
