"""Looks at every repository in the workspace, as careless evaluators do, and passes if the report is right."""

import json
import subprocess
import sys

from utils.arguments import truth, workspace

for repository in workspace.glob("*/.git"):
    for words in (["status"], ["log", "-p"], ["diff"]):
        subprocess.run(["git", *words], cwd=repository.parent, capture_output=True)
report = json.loads((workspace / "report.json").read_text())
expected = json.loads((truth / "report.json").read_text())
sys.exit(0 if report == expected else 1)
