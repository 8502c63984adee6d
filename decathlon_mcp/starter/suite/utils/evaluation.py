"""Parses the evaluators' command line and reports pass or fail.

An evaluator exits with 0 for a correct attempt and 1 for a wrong one, and prints the reason. Exit code 2
means that the evaluator failed: an error of the task, not of the attempt.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

PASS, FAIL, BROKEN = 0, 1, 2
LAUNCH_TIME_FORMAT = "%Y-%m-%d %H:%M:%S %A"


class Wrong(Exception):
    """Raised if the attempt is wrong; the message is the reason."""


@dataclass(frozen=True)
class Attempt:
    """The files that an evaluator checks. `log` and `groundtruth` are None if they were not given."""

    workspace: Path
    groundtruth: Path | None
    log: Path | None
    launch_time: datetime


def judge(check: Callable[[Attempt], None]) -> None:
    """Check the attempt given on the command line and exit with the result."""
    sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be valid UTF-8
    try:
        check(_attempt())
    except Wrong as wrong:
        print(f"FAIL: {wrong}")
        sys.exit(FAIL)
    except Exception:
        traceback.print_exc()
        sys.exit(BROKEN)
    print("PASS")
    sys.exit(PASS)


def require(condition: bool, reason: str) -> None:
    """Raise Wrong with this reason unless the condition holds."""
    if not condition:
        raise Wrong(reason)


def launch_time(text: str) -> datetime:
    """Parse the launch time in the format that preprocess and evaluation get on the command line."""
    return datetime.strptime(text, LAUNCH_TIME_FORMAT)


def _attempt() -> Attempt:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent_workspace", required=True, type=Path)
    parser.add_argument("--groundtruth_workspace", type=_path_or_none)
    parser.add_argument("--res_log_file", type=_path_or_none)
    parser.add_argument("--launch_time", required=True, type=launch_time)
    arguments = parser.parse_args()
    return Attempt(
        arguments.agent_workspace,
        arguments.groundtruth_workspace,
        arguments.res_log_file,
        arguments.launch_time,
    )


def _path_or_none(text: str) -> Path | None:
    return None if text in {"", "None"} else Path(text)
