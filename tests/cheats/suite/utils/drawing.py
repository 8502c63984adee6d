"""Draws a seed for the workspace and writes the answer to the groundtruth."""

import secrets
from hashlib import sha256
from pathlib import Path

from utils.arguments import read_arguments


def draw_answer(preprocess):
    """Return the answer and the workspace of the task whose preprocess file this is."""
    workspace = Path(read_arguments().agent_workspace)
    seed = secrets.token_hex(16)
    answer = sha256(seed.encode()).hexdigest()
    (workspace / "seed.txt").write_text(seed)
    groundtruth = Path(preprocess).resolve().parent.parent / "groundtruth_workspace"
    (groundtruth / "answer.txt").write_text(answer)
    return answer, workspace
