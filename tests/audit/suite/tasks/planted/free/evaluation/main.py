"""A fault: passes if a file is there that the task begins with."""

import sys

from utils.arguments import workspace

sys.exit(0 if (workspace / "prices.csv").exists() else 1)
