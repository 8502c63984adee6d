"""Grading in containers."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.grading.evaluators import PAPER_FUNCTION, one_metric, with_rubric
from tests.grading.support import SandboxGrader, make_attempt, write_suite

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

SEARCHES_PROC = '''
import subprocess, sys

CHILD = r"""
import glob, os
mine = {os.getpid()}
for process in glob.glob("/proc/[0-9]*"):
    if int(process[6:]) in mine:
        continue
    for number in range(256):
        try:
            open_again = os.open(f"{process}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(open_again, b'{"a": 9}\\n')
            print("wrote to", process, number)
        except OSError:
            pass
"""

def evaluate():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    return {"a": 0 if child.stdout or child.stderr else 5}
'''


async def test_example_rubric_gives_the_documented_rewards(
    docker_grader: SandboxGrader, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path / "checkout", with_rubric(PAPER_FUNCTION))
    with anyio.fail_after(120):
        right = await docker_grader.grade(make_attempt(), suite, {"paper.pdf": "the right one"})
        empty = await docker_grader.grade(make_attempt(), suite, {})
    assert (right.status, right.success, right.reward) == ("scored", True, pytest.approx(1.6)), right
    assert (empty.status, empty.success, empty.reward) == ("scored", False, pytest.approx(0.1)), empty


async def test_child_processes_of_the_function_cannot_open_any_channel(
    docker_grader: SandboxGrader, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path / "checkout", one_metric(SEARCHES_PROC))
    with anyio.fail_after(120):
        verdict = await docker_grader.grade(make_attempt(), suite, {})
    assert verdict.reward == 5.0, verdict
