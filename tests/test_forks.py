"""`--forks`: what pytest prints is the same, and a process that dies takes one test with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = """
from tests.forks import Forks

def pytest_configure(config):
    config.pluginmanager.register(Forks(2))
"""
ONE = """
import os, pytest

@pytest.fixture(scope="module")
def shared():
    yield os.getpid()
    print("torn down")

def test_passes(shared): assert os.getpid() == shared
def test_prints(): print("what was printed"); assert False
def test_dies(): os._exit(7)
def test_runs_elsewhere(shared): assert os.getpid() == shared
"""
OTHER = "def test_other(): pass\n"


def run(folder: Path, *words: str) -> str:
    for name, text in (("conftest.py", CONFTEST), ("test_one.py", ONE), ("test_other.py", OTHER)):
        (folder / name).write_text(text)
    command = (sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *words, str(folder))
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False).stdout


def test_a_process_that_dies_fails_its_test_and_another_runs_what_is_left(tmp_path: Path) -> None:
    printed = run(tmp_path)
    assert "2 failed, 3 passed" in printed
    assert "what was printed" in printed
    assert "FAILED test_one.py::test_dies - its process ended with status 7" in printed
    assert "PASSED test_one.py::test_runs_elsewhere" in printed


def test_no_test_starts_after_the_last_failure_that_is_allowed(tmp_path: Path) -> None:
    printed = run(tmp_path, "-x", "-k", "one")
    assert "1 failed, 1 passed" in printed
    assert "stopping after 1 failures" in printed
