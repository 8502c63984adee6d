"""Real checkouts, where DECATHLON_TOOLATHLON or DECATHLON_TOOLATHLON_GYM points to one."""

from __future__ import annotations

import os
import re
import tarfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.suites.host import HostInfo
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.splits import packaged_splits
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

SEARCH_KEY = "token.serper_api_key"
"""Searching the web needs a key, but no account that a task works on."""


NAMES = {"toolathlon": "DECATHLON_TOOLATHLON", "gym": "DECATHLON_TOOLATHLON_GYM"}
"""Which profile's checkout each variable points to; `conftest` collects nothing here where none does."""

THERE = [name for name, variable in NAMES.items() if os.environ.get(variable)]


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
        specs = suite.server_specs(task, root=suite.profile.root, values=values)
        assert [spec["name"] for spec in specs] == list(task.needs.servers)
        assert "${" not in str(specs)
        told = suite.prompt(task, root=suite.profile.root, launch_time=datetime.now(), names="decathlon")
        assert "!!<<<<" not in told.instructions
        assert "local-claim_done" not in told.instructions
        assert "without calling any tool" not in told.instructions
        archive.unlink(missing_ok=True)
        suite.task_archive(task, archive, sealed=False)
        with tarfile.open(archive) as tar:
            for name in tar.getnames():
                path = PurePosixPath(name)
                assert path.is_relative_to(task.folder) or path.name == "__init__.py"
                assert not {"groundtruth_workspace", "evaluation"} & {
                    *path.relative_to(task.folder).parts[:1]
                }


KINDS = {
    "toolathlon": {"nothing": 15, "internet": 20, "accounts": 38, "hosted": 20, "hosted and accounts": 15},
    "gym": {"nothing": 5, "hosted": 498},
}


@pytest.fixture(scope="module", params=THERE)
def suite(request: pytest.FixtureRequest) -> Suite:
    return load_suite(os.environ[NAMES[request.param]])


def test_tasks_are_of_the_known_kinds(suite: Suite) -> None:
    assert Counter(kind(task) for task in suite.tasks.values()) == KINDS[suite.profile.name]


IN_CHINESE = {"toolathlon": 49, "gym": 0}


def test_tasks_with_a_text_in_chinese_are_prompted_in_it(suite: Suite) -> None:
    chinese = load_suite(suite.path, HostInfo("cn"))
    told = [task for task in chinese.tasks.values() if task.parts.has_text]
    assert len(told) == IN_CHINESE[suite.profile.name]
    for task in told:
        prompt = chinese.prompt(
            task, root=suite.profile.root, launch_time=datetime.now(), names="decathlon"
        ).instructions
        assert "claim_done" in prompt
        assert not re.search(r"!!<<<<|local-claim", prompt)


def test_the_packages_lists_name_every_task_and_no_other(suite: Suite) -> None:
    listed = packaged_splits(suite.profile.name)
    assert not listed or {*listed} == {*suite.tasks}
    assert all(len(task.splits) == 1 for task in suite.tasks.values())


def test_every_task_is_prompted_packed_and_started(suite: Suite, tmp_path: Path) -> None:
    walk(suite, tmp_path / "t.tar")


def test_loading_takes_less_than_a_second(suite: Suite) -> None:
    started = time.process_time()
    load_suite(suite.path)
    assert time.process_time() - started < 1.0
