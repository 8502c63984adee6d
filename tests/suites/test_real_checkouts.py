"""Real checkouts, where DECATHLON_TOOLATHLON or DECATHLON_TOOLATHLON_GYM points to one."""

from __future__ import annotations

import os
import tarfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.suites import Suite, Task, load_suite

SEARCH_KEY = "token.serper_api_key"
"""Searching the web needs a key, but no account that a task works on."""


def checkout_of(variable: str) -> Path:
    if not (path := os.environ.get(variable)):
        pytest.skip(f"{variable} points to no checkout")
    return Path(path)


@pytest.fixture(scope="module")
def toolathlon() -> Suite:
    return load_suite(checkout_of("DECATHLON_TOOLATHLON"))


@pytest.fixture(scope="module")
def gym() -> Suite:
    return load_suite(checkout_of("DECATHLON_TOOLATHLON_GYM"))


def kind(task: Task) -> str:
    """What of the outside a task needs first of all."""
    accounts = [name for name in task.needs.credentials if name != SEARCH_KEY]
    if task.needs.services:
        return "hosted and accounts" if accounts else "hosted"
    if accounts:
        return "accounts"
    return "internet" if task.needs.network else "nothing"


def walk(suite: Suite, archive: Path) -> None:
    for task in suite.tasks.values():
        assert task.errors == ()
        values = dict.fromkeys(suite.wanted_values(task), "value")
        specs = suite.server_specs(task, root=suite.dialect.root, values=values)
        assert [spec["name"] for spec in specs] == list(task.needs.servers)
        assert "${" not in str(specs)
        told = suite.prompt(task, root=suite.dialect.root, launch_time=datetime.now(), names="decathlon")
        assert "!!<<<<" not in told.instructions
        assert "local-claim_done" not in told.instructions
        assert "without calling any tool" not in told.instructions
        suite.task_archive(task, archive, sealed=False)
        with tarfile.open(archive) as tar:
            for name in tar.getnames():
                path = PurePosixPath(name)
                assert path.is_relative_to(task.folder) or path.name == "__init__.py"
                assert not {"groundtruth_workspace", "evaluation"} & {
                    *path.relative_to(task.folder).parts[:1]
                }


def test_toolathlon_has_108_tasks_of_the_known_kinds(toolathlon: Suite) -> None:
    assert toolathlon.dialect.name == "toolathlon"
    kinds = Counter(kind(task) for task in toolathlon.tasks.values())
    assert kinds == {
        "nothing": 15,
        "internet": 20,
        "accounts": 38,
        "hosted": 20,
        "hosted and accounts": 15,
    }


def test_every_task_of_toolathlon_is_prompted_packed_and_started(toolathlon: Suite, tmp_path: Path) -> None:
    walk(toolathlon, tmp_path / "t.tar")
    assert toolathlon.conflicts("student-interview") == {"student-interview", "set-conf-cr-ddl"}


def test_the_gym_has_503_tasks_five_of_them_without_a_database(gym: Suite) -> None:
    assert gym.dialect.name == "gym"
    kinds = Counter(kind(task) for task in gym.tasks.values())
    assert kinds == {"nothing": 5, "hosted": 498}


def test_every_task_of_the_gym_is_prompted_packed_and_started(gym: Suite, tmp_path: Path) -> None:
    walk(gym, tmp_path / "t.tar")


@pytest.mark.parametrize("variable", ["DECATHLON_TOOLATHLON", "DECATHLON_TOOLATHLON_GYM"])
def test_loading_takes_less_than_a_second(variable: str) -> None:
    path = checkout_of(variable)
    started = time.process_time()
    load_suite(path)
    assert time.process_time() - started < 1.0
