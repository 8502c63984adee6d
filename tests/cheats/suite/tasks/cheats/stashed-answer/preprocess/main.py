"""Leaves the answer in the workspace, as an object of a git repository that no branch reaches."""

import subprocess

from utils.drawing import draw_answer

answer, workspace = draw_answer(__file__)
subprocess.run(["git", "init", "-q", "library"], cwd=workspace, check=True)
subprocess.run(
    ["git", "hash-object", "-w", "--stdin"],
    cwd=workspace / "library",
    input=f"{answer}\n".encode(),
    check=True,
    capture_output=True,
)
