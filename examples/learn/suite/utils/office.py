"""What both tasks share: the generator of their files, and the share of an answer that is right."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

MAX_BYTES = 4096


def prepare(file: str, make: Callable[[random.Random], object], task: Path) -> None:
    """Write what `make` returns, as JSON, for the agent's server and for the evaluator.

    The launch time is the seed. `task` is the folder of the task.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent_workspace", required=True, type=Path)
    parser.add_argument("--launch_time", required=True)
    arguments, _ = parser.parse_known_args()
    text = json.dumps(make(random.Random(arguments.launch_time)))
    groundtruth = task / "groundtruth_workspace"
    groundtruth.mkdir(exist_ok=True)
    for folder in (arguments.agent_workspace, groundtruth):
        (folder / file).write_text(text)


def share(lines: list[str], expected: set[str]) -> float:
    """The expected lines less half of all others, repeated ones too, as a share of the expected; 0 to 1."""
    right = len(expected.intersection(lines))
    return max(0.0, right - (len(lines) - right) / 2) / len(expected)


def lines_of(file: Path) -> list[str]:
    """The lines that the agent's tools wrote; none if the file cannot be read."""
    try:
        if file.is_symlink() or file.stat().st_size > MAX_BYTES:
            return []
        return file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
