"""Checks the exact directory tree: every sheet in its place, unchanged, and no other files."""

import hashlib
import json

from utils.evaluation import Attempt, judge, require
from utils.submission import regular_file, tree


def check(attempt: Attempt) -> None:
    expected = json.loads((attempt.groundtruth / "tree.json").read_text())
    actual = tree(attempt.workspace)
    for name in actual:
        require(name in expected, f"{name} should not be there")
    for name in expected:
        require(name in actual, "a sheet is not where it belongs")
    for name, digest in expected.items():
        data = regular_file(attempt.workspace, name).read_bytes()
        require(hashlib.sha256(data).hexdigest() == digest, f"{name} is not the file that belongs there")


if __name__ == "__main__":
    judge(check)
