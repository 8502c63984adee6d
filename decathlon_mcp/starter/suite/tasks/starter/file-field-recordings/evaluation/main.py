"""Checks the exact directory tree: every sheet in its place, unchanged, and no other files."""

import hashlib
import json

from utils.evaluation import Attempt, judge, require
from utils.leftovers import regular_file, tree


def check(attempt: Attempt) -> None:
    wanted = json.loads((attempt.groundtruth / "tree.json").read_text())
    found = tree(attempt.workspace)
    for name in found:
        require(name in wanted, f"{name} should not be there")
    for name in wanted:
        require(name in found, "a sheet is not where it belongs")
    for name, digest in wanted.items():
        data = regular_file(attempt.workspace, name).read_bytes()
        require(hashlib.sha256(data).hexdigest() == digest, f"{name} is not the file that belongs there")


if __name__ == "__main__":
    judge(check)
