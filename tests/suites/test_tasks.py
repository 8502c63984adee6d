"""Reading tasks: what a folder says, and that one broken file hides nothing else."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.tasks import Parts

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout


def test_a_task_is_its_folder(checkout: Checkout) -> None:
    checkout.server("files")
    checkout.task(
        "find-paper",
        servers=("files",),
        max_turns=10,
        meta={"difficulty": "easy"},
        unknown_to_us=True,
        files={
            "preprocess/main.py": "",
            "groundtruth_workspace/answer.txt": "42",
            "initial_workspace/question.txt": "?",
            "token_key_session.py": "all_token_key_session = dict()",
        },
    )
    task = checkout.load().tasks["find-paper"]
    assert task.folder == PurePosixPath("tasks/finalpool/find-paper")
    assert task.suite == "checkout"
    assert task.parts == Parts(
        preprocess="preprocess.main",
        groundtruth="groundtruth_workspace",
        initial_workspace="initial_workspace",
    )
    assert task.has_token_file
    assert not task.in_place
    assert (task.max_turns, task.meta) == (10, {"difficulty": "easy"})
    assert task.config["unknown_to_us"] is True
    assert task.errors == ()


def test_a_folder_named_preprocess_without_a_main_is_no_preprocess(checkout: Checkout) -> None:
    checkout.task(files={"preprocess/notes.md": ""})
    assert not checkout.load().tasks["find-paper"].has_preprocess


def test_local_tools_leave_out_ours_and_those_of_a_scaffold(checkout: Checkout) -> None:
    listed = ("claim_done", "python_execute", "manage_context", "history", "handle_overlong_tool_outputs")
    checkout.task(local_tools=listed)
    assert checkout.load().tasks["find-paper"].needs.local_tools == (
        "python_execute",
        "handle_overlong_tool_outputs",
    )


def test_a_server_named_twice_is_needed_once(checkout: Checkout) -> None:
    checkout.server("files")
    checkout.task(servers=("files", "files"))
    assert checkout.load().tasks["find-paper"].needs.servers == ("files",)


def test_tasks_of_two_splits_with_one_name_are_told_apart(checkout: Checkout) -> None:
    checkout.task("alone")
    checkout.task("both")
    checkout.task("both", split="dev")
    assert list(checkout.load().tasks) == ["dev.both", "alone", "finalpool.both"]


def test_what_is_no_task_is_passed_over(checkout: Checkout) -> None:
    checkout.task()
    checkout.write("tasks/finalpool/.utils/docs/task.md")
    checkout.write("tasks/finalpool/_scratch/docs/task.md")
    checkout.write("tasks/finalpool/leftover/traj_log.json")
    checkout.write("tasks/finalpool/task_conflict.json", "{}")
    assert list(checkout.load().tasks) == ["find-paper"]


def test_a_linked_task_is_not_followed(checkout: Checkout, tmp_path: Path) -> None:
    checkout.task()
    elsewhere = checkout.task("elsewhere").rename(tmp_path / "elsewhere")
    (checkout.path / "tasks/finalpool/elsewhere").symlink_to(elsewhere)
    assert list(checkout.load().tasks) == ["find-paper"]


def test_a_broken_configuration_names_file_and_line_and_hides_no_other_task(checkout: Checkout) -> None:
    checkout.task("good")
    checkout.task("bad")
    path = checkout.write("tasks/finalpool/bad/task_config.json", '{\n  "needed_mcp_servers": [,]\n}')
    suite = checkout.load()
    assert suite.task("good").errors == ()
    assert suite.missing(suite.tasks["good"]) == []
    with pytest.raises(SuiteError, match=r"task_config\.json, line 2: not JSON") as raised:
        suite.task("bad")
    assert raised.value.data["file"] == str(path)
    assert raised.value.data["line"] == 2
    assert "not JSON" in suite.missing(suite.tasks["bad"])[0]


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ('{\n  "needed_local_tools": []\n}', 1, "needed_mcp_servers"),
        ('{\n  "needed_mcp_servers": "files"\n}', 2, "needed_mcp_servers"),
        ('{\n  "needed_mcp_servers": [\n    "files",\n    7\n  ]\n}', 4, "needed_mcp_servers.1"),
        ('{\n  "needed_mcp_servers": [],\n\n  "max_turns": "many"\n}', 4, "max_turns"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_its_line(
    checkout: Checkout, text: str, line: int, field: str
) -> None:
    checkout.task()
    checkout.write("tasks/finalpool/find-paper/task_config.json", text)
    with pytest.raises(SuiteError) as raised:
        checkout.load().task("find-paper")
    assert raised.value.data["line"] == line
    assert raised.value.data["field"] == field
    assert f"line {line}: {field}: " in raised.value.message


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null"])
def test_a_configuration_that_is_no_mapping_is_an_error(checkout: Checkout, text: str) -> None:
    checkout.task()
    checkout.write("tasks/finalpool/find-paper/task_config.json", text)
    with pytest.raises(SuiteError, match="a mapping was expected"):
        checkout.load().task("find-paper")


def test_a_configuration_that_is_not_utf_8_is_an_error(checkout: Checkout) -> None:
    folder = checkout.task()
    (folder / "task_config.json").write_bytes(b'{"needed_mcp_servers": ["\xff"]}')
    with pytest.raises(SuiteError, match="not UTF-8"):
        checkout.load().task("find-paper")


@pytest.mark.parametrize("file", ["task_config.json", "docs/task.md", "evaluation/main.py"])
def test_a_file_that_every_task_has_is_missed(checkout: Checkout, file: str) -> None:
    folder = checkout.task()
    (folder / file).unlink()
    suite = checkout.load()
    with pytest.raises(SuiteError) as raised:
        suite.task("find-paper")
    assert raised.value.data["file"] == str(folder / file)


def test_a_path_that_is_not_there_says_what_was_looked_for_and_where(tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as raised:
        load_suite(tmp_path / "nowhere")
    message = raised.value.message
    assert f"{tmp_path / 'nowhere'} is not there" in message
    assert "tasks/<split>/<task>/task_config.json" in message


def test_a_folder_that_is_no_suite_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(SuiteError, match=r"not a checkout in Toolathlon's layout.*found README\.md"):
        load_suite(tmp_path)
    with pytest.raises(SuiteError, match="is not a folder"):
        load_suite(tmp_path / "README.md")


@pytest.mark.parametrize("place", ["tasks", "tasks/finalpool/find-paper", ".."])
def test_a_path_beside_a_suite_says_where_the_suite_is(checkout: Checkout, place: str) -> None:
    checkout.task()
    with pytest.raises(SuiteError) as raised:
        load_suite((checkout.path / place).resolve())
    assert raised.value.message.endswith(f"; did you mean {checkout.path}?")


def test_the_bundled_suite_loads_and_needs_nothing_from_outside() -> None:
    suite = load_suite("starter")
    assert suite.profile.name == "starter"
    assert len(suite.tasks) >= 6
    for task in suite.tasks.values():
        assert suite.missing(task) == []
        assert not task.needs.network
        assert not suite.wanted_values(task)
