"""`suite.yaml`: profiles and their overrides, settings of tasks, splits and conflicts."""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.suite_file import Deadlines

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout


def test_a_checkout_without_marks_has_toolathlons_profile(checkout: Checkout) -> None:
    checkout.task()
    suite = checkout.load()
    assert suite.profile.name == "toolathlon"
    assert suite.name == "checkout"
    assert suite.profile.image == "lockon0927/toolathlon-task-image:1016beta"
    assert suite.task_dir(suite.tasks["find-paper"]) == "finalpool/find-paper"


@pytest.mark.parametrize("script", ["evaluation/main.py", "preprocess/main.py"])
def test_the_gyms_profile_is_detected_by_its_tasks(checkout: Checkout, script: str) -> None:
    """Its forks leave out or rename files of its root."""
    checkout.task("first")
    checkout.task("second", files={script: 'DB = {"dbname": "toolathlon_gym", "port": 5432}\n'})
    assert checkout.load().profile.name == "gym"


def test_a_checkout_that_is_taken_for_toolathlon_is_warned_of(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    checkout.task()
    (checkout.path / "global_preparation").rmdir()
    assert checkout.load().profile.name == "toolathlon"
    assert "taken for the usual one" in caplog.text
    caplog.clear()
    checkout.write("scripts/run_single_containerized.sh")
    assert checkout.load().profile.name == "toolathlon"
    assert "taken for" not in caplog.text


def test_suite_yaml_overrides_fields_of_the_profile(checkout: Checkout) -> None:
    checkout.task()
    checkout.write(
        "suite.yaml",
        """\
        name: mine
        profile: gym
        root: /suite
        image: mine:latest
        python: [/usr/bin/python3]
        environment: {PGHOST: db}
        """,
    )
    suite = checkout.load()
    assert suite.name == "mine"
    assert suite.tasks["find-paper"].suite == "mine"
    profile = suite.profile
    assert (profile.name, profile.root, profile.image) == ("gym", PurePosixPath("/suite"), "mine:latest")
    assert profile.python == ("/usr/bin/python3",)
    environment = dict(profile.environment)
    assert (environment["PGHOST"], environment["PGPORT"]) == ("db", "5432")


def test_the_exact_name_overrides_patterns_in_settings_of_tasks(checkout: Checkout) -> None:
    checkout.server("fetch")
    for name in ("web-one", "web-two", "other"):
        checkout.task(name, servers=("fetch",))
    checkout.write(
        "suite.yaml",
        """\
        deadlines: {preprocess_seconds: 100, evaluation_seconds: 200}
        tasks:
          web-two: {in_place: false, deadlines: {evaluation_seconds: 5}}
          "web-*": {in_place: true, network: false, grader_network: true, deadlines: {evaluation_seconds: 50}}
        """,
    )
    tasks = checkout.load().tasks
    assert [tasks[name].in_place for name in ("web-one", "web-two", "other")] == [True, False, False]
    assert [tasks[name].needs.network for name in ("web-one", "web-two", "other")] == [False, False, True]
    assert tasks["web-two"].grader_network
    assert tasks["other"].grader_network, "the same as the agent's by default"
    assert tasks["web-two"].deadlines == Deadlines(preprocess_seconds=100, evaluation_seconds=5)
    assert tasks["other"].deadlines == Deadlines(preprocess_seconds=100, evaluation_seconds=200)


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("profile: toolathlon\nimagee: x\n", 2, "imagee"),
        ("profile: klingon\n", None, "profile"),
        ("workspace: ../outside\n", 1, "workspace"),
        ("common:\n  - configs\n  - /etc\n", 3, "common.1"),
        ("tasks:\n  a:\n    in_plaice: true\n", 3, "tasks.a.in_plaice"),
        ("deadlines: {evaluation_seconds: 0}\n", 1, "deadlines.evaluation_seconds"),
    ],
)
def test_what_does_not_fit_names_file_line_and_field(
    checkout: Checkout, text: str, line: int | None, field: str
) -> None:
    checkout.task()
    path = checkout.write("suite.yaml", text)
    with pytest.raises(SuiteError) as raised:
        checkout.load()
    assert raised.value.data == {"file": str(path), "line": line, "field": field}


@pytest.mark.parametrize("text", ["[" * 100_000, "? " * 100_000])
def test_a_file_that_is_nested_too_deeply_is_an_error(checkout: Checkout, text: str) -> None:
    checkout.task()
    checkout.write("suite.yaml", text)
    with pytest.raises(SuiteError, match=r"suite\.yaml, line 1: nested more than 100 levels deep"):
        checkout.load()


def test_lists_of_a_suite_are_its_splits_and_unmatched_patterns_are_logged(
    checkout: Checkout, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("find-paper", "find-book", "write-book"):
        checkout.task(name)
    checkout.write("suite.yaml", 'splits: {train: ["find-*"], small: [find-book], test: [find-bok]}\n')
    with caplog.at_level(logging.WARNING):
        tasks = checkout.load().tasks
    assert tasks["find-book"].splits == ("train", "small")
    assert tasks["find-paper"].splits == ("train",)
    assert tasks["write-book"].splits == ()
    assert vars(caplog.records[0])["fields"] == {"field": "splits", "task": "find-bok"}


def test_conflict_groups_and_accounts_are_shared_resources(checkout: Checkout) -> None:
    for name in ("a", "b", "c", "d", "notion-x", "notion-y"):
        checkout.task(name)
    checkout.write(
        "tasks/finalpool/task_conflict.json", '{"conflict_groups": [["a", "b"], ["gone", "elsewhere"]]}'
    )
    checkout.write("suite.yaml", 'conflicts: [[b, c]]\naccounts: {notion: ["notion-*"]}\n')
    suite = checkout.load()
    shared = {name: {resource.key for resource in suite.shared_resources(name)} for name in suite.tasks}
    assert (len(shared["a"]), len(shared["b"]), len(shared["c"])) == (1, 2, 1)
    assert shared["b"] == shared["a"] | shared["c"]
    assert shared["d"] == set()
    assert shared["notion-x"] == shared["notion-y"]
    assert [resource.name for resource in suite.shared_resources("notion-x")] == ["the account notion"]
    assert [resource.name for resource in suite.shared_resources("a")] == ["the conflict group of a, b"]
    assert all(resource.slots == ("",) for resource in suite.shared_resources("b"))
