"""Real checkouts are read whole: `python -m pytest tools/fidelity/checkouts.py`.

DECATHLON_TOOLATHLON and DECATHLON_TOOLATHLON_GYM are their paths.
"""

from __future__ import annotations

import os
import re
import tarfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.suites.loading import load_suite, packaged_splits
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

SEARCH_KEY = "token.serper_api_key"
"""Web search needs a key, but tasks do not work on its account."""

VARIABLES = {"toolathlon": "DECATHLON_TOOLATHLON", "gym": "DECATHLON_TOOLATHLON_GYM"}
"""The variable with the path of each profile's checkout."""

AVAILABLE = [name for name, variable in VARIABLES.items() if os.environ.get(variable)]


def kind(task: Task) -> str:
    """The external resources that a task needs."""
    accounts = [name for name in task.needs.credentials if name != SEARCH_KEY]
    if task.needs.services:
        return "hosted and accounts" if accounts else "hosted"
    if accounts:
        return "accounts"
    return "internet" if task.needs.network else "nothing"


def check_tasks(suite: Suite, archive: Path) -> None:
    for task in suite.tasks.values():
        assert task.errors == ()
        values = dict.fromkeys(suite.token_names(task), "value")
        specs = suite.server_specs(task, root=suite.profile.root, values=values)
        assert [spec["name"] for spec in specs] == list(task.needs.servers)
        assert "${" not in str(specs)
        prompt = suite.prompt(task, root=suite.profile.root, launch_time=datetime.now(), names="decathlon")
        assert "!!<<<<" not in prompt.instructions
        assert "local-claim_done" not in prompt.instructions
        assert "without calling any tool" not in prompt.instructions
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
    "gym": {"nothing": 5, "hosted": 488, "hosted and accounts": 10},
}


@pytest.fixture(scope="module", params=AVAILABLE)
def suite(request: pytest.FixtureRequest) -> Suite:
    return load_suite(os.environ[VARIABLES[request.param]])


def test_the_kinds_of_tasks_are_known(suite: Suite) -> None:
    assert Counter(kind(task) for task in suite.tasks.values()) == KINDS[suite.profile.name]


IN_CHINESE = {"toolathlon": 49, "gym": 0}


def test_tasks_with_a_chinese_text_have_a_chinese_prompt(suite: Suite) -> None:
    chinese = load_suite(suite.path, "cn")
    translated = [task for task in chinese.tasks.values() if task.files.has_text]
    assert len(translated) == IN_CHINESE[suite.profile.name]
    for task in translated:
        prompt = chinese.prompt(
            task, root=suite.profile.root, launch_time=datetime.now(), names="decathlon"
        ).instructions
        assert "claim_done" in prompt
        assert not re.search(r"!!<<<<|local-claim", prompt)


def test_the_packaged_splits_list_exactly_the_tasks(suite: Suite) -> None:
    listed = packaged_splits(suite.profile.name)
    assert not listed or {*listed} == {*suite.tasks}
    assert all(len(task.splits) == 1 for task in suite.tasks.values())


def test_every_task_has_a_prompt_archives_and_server_specs(suite: Suite, tmp_path: Path) -> None:
    check_tasks(suite, tmp_path / "t.tar")


def test_loading_takes_less_than_a_second(suite: Suite) -> None:
    started = time.process_time()
    load_suite(suite.path)
    assert time.process_time() - started < 1.0
