"""The probe suite with one more task, for the checks of services."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.probe.serving import SUITE


def copy_suite(folder: Path, task: str, *, preprocess: str, evaluation: str, utils: dict[str, str]) -> Path:
    """Copy the suite into a new folder, with a task of these programs and these modules in `utils`."""
    suite = folder / "suite"
    shutil.copytree(SUITE, suite)
    own = suite / "tasks/probe" / task
    shutil.copytree(suite / "tasks/probe/find-answer", own)
    (own / "preprocess").mkdir()
    (own / "preprocess/main.py").write_text(preprocess)
    (own / "evaluation/main.py").write_text(evaluation)
    for name, text in utils.items():
        (suite / "utils" / name).write_text(text)
    return suite
