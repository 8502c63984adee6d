"""Passes for the right answer, which a tool gives away."""

import sys

from utils.arguments import truth, workspace

answer = (workspace / "answer.txt").read_text()
sys.exit(0 if answer.strip() == (truth / "answer.txt").read_text().strip() else 1)
