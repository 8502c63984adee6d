"""Sources of evaluators for test checkouts."""

from __future__ import annotations

from tests.grading.support import PAPER, rubric_text

ARGUMENTS = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
for name in ("agent_workspace", "groundtruth_workspace", "res_log_file", "launch_time"):
    parser.add_argument("--" + name, required=True)
args = parser.parse_args()
"""
REQUIRES_PAPER = (
    ARGUMENTS
    + """
raise SystemExit(0 if os.path.exists(os.path.join(args.agent_workspace, "paper.pdf")) else 1)
"""
)
EXAMPLE_RUBRIC = rubric_text(
    function="evaluation/evaluator.py:evaluate",
    weights={"paper_downloaded": 0.5, "correct_paper": 1.0, "efficient": 0.1},
)
PAPER_FUNCTION = """
import json, os

def evaluate(workspace, groundtruth, log):
    print('{"reward": 1000, "paper_downloaded": 99}')
    found = os.path.join(workspace, "paper.pdf")
    with open(os.path.join(groundtruth, "paper.pdf")) as right, open(log) as calls:
        correct = os.path.exists(found) and open(found).read() == right.read()
        return {
            "paper_downloaded": os.path.exists(found),
            "correct_paper": correct,
            "efficient": json.load(calls)["key_stats"]["tool_calls"] < 20,
        }
"""


def evaluator(source: str, **files: str) -> dict[str, str]:
    return {
        f"{PAPER}/evaluation/main.py": source,
        **{f"{PAPER}/{name}": text for name, text in files.items()},
    }


def with_rubric(function: str, text: str = EXAMPLE_RUBRIC, main: str = REQUIRES_PAPER) -> dict[str, str]:
    return evaluator(
        main,
        **{
            "evaluation/evaluator.py": function,
            "evaluation/rubric.yaml": text,
            "groundtruth_workspace/paper.pdf": "the right one",
        },
    )


def one_metric(body: str) -> dict[str, str]:
    text = rubric_text(function="evaluation/evaluator.py:evaluate", weights={"a": 1}, ranges={"a": [-10, 10]})
    return with_rubric(body, text, main="raise SystemExit(0)")
