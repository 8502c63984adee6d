"""Reading the folders of tasks, and the errors in them."""

from __future__ import annotations

import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.suites.documents import read_text
from decathlon_mcp.suites.loading import load_suite

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout


def test_claim_done_and_conversation_tools_are_no_local_tools(checkout: Checkout) -> None:
    listed = ("claim_done", "python_execute", "manage_context", "history", "handle_overlong_tool_outputs")
    checkout.task(local_tools=listed)
    assert checkout.load().tasks["find-paper"].needs.local_tools == (
        "python_execute",
        "handle_overlong_tool_outputs",
    )


def test_tasks_of_two_splits_with_one_name_have_the_split_in_their_ids(checkout: Checkout) -> None:
    checkout.task("alone")
    checkout.task("both")
    checkout.task("both", split="dev")
    assert list(checkout.load().tasks) == ["dev.both", "alone", "finalpool.both"]


def test_folders_that_are_no_tasks_are_ignored(checkout: Checkout) -> None:
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


def test_an_error_in_a_configuration_names_its_line_and_hides_no_other_task(checkout: Checkout) -> None:
    checkout.task("good")
    checkout.task("bad")
    path = checkout.write("tasks/finalpool/bad/task_config.json", '{\n  "needed_mcp_servers": [,]\n}')
    suite = checkout.load()
    assert suite.task("good").errors == ()
    with pytest.raises(SuiteError, match=r"task_config\.json, line 2: not JSON") as raised:
        suite.task("bad")
    assert raised.value.data["file"] == str(path)
    assert raised.value.data["line"] == 2


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("9" * 5000, "an integer of 5000 digits"),
        ("NaN", "NaN is no number"),
        (r'"\ud83d"', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_value_that_cannot_be_listed_is_an_error_of_its_task_only(
    checkout: Checkout, value: str, problem: str
) -> None:
    checkout.task("good", meta={"small": 2**62, "word": "\U0001f600"})
    checkout.task("bad")
    checkout.write(
        "tasks/finalpool/bad/task_config.json", f'{{"needed_mcp_servers": [], "meta": {{"a": {value}}}}}'
    )
    suite = checkout.load()
    assert suite.task("good").meta == {"small": 2**62, "word": "\U0001f600"}
    with pytest.raises(SuiteError, match=problem):
        suite.task("bad")


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ('{\n  "needed_local_tools": []\n}', 1, "needed_mcp_servers"),
        ('{\n  "needed_mcp_servers": [\n    "files",\n    7\n  ]\n}', 4, "needed_mcp_servers.1"),
    ],
)
def test_an_invalid_field_is_named_with_its_line(
    checkout: Checkout, text: str, line: int, field: str
) -> None:
    checkout.task()
    checkout.write("tasks/finalpool/find-paper/task_config.json", text)
    with pytest.raises(SuiteError) as raised:
        checkout.load().task("find-paper")
    assert raised.value.data["line"] == line
    assert raised.value.data["field"] == field
    assert f"line {line}: {field}: " in raised.value.message


def test_a_configuration_that_is_not_utf_8_is_an_error(checkout: Checkout) -> None:
    folder = checkout.task()
    (folder / "task_config.json").write_bytes(b'{"needed_mcp_servers": ["\xff"]}')
    with pytest.raises(SuiteError, match="not UTF-8"):
        checkout.load().task("find-paper")


@pytest.mark.parametrize("file", ["task_config.json", "docs/task.md", "evaluation/main.py"])
def test_a_missing_file_is_an_error(checkout: Checkout, file: str) -> None:
    folder = checkout.task()
    (folder / file).unlink()
    suite = checkout.load()
    with pytest.raises(SuiteError) as raised:
        suite.task("find-paper")
    assert raised.value.data["file"] == str(folder / file)


def test_a_missing_folder_is_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as raised:
        load_suite(tmp_path / "nowhere")
    message = raised.value.message
    assert f"{tmp_path / 'nowhere'} does not exist" in message
    assert "tasks/<split>/<task>/task_config.json" in message


@pytest.mark.parametrize("place", ["tasks", "tasks/finalpool/find-paper", ".."])
def test_a_path_near_a_suite_is_an_error_that_suggests_the_suite(checkout: Checkout, place: str) -> None:
    checkout.task()
    with pytest.raises(SuiteError) as raised:
        load_suite((checkout.path / place).resolve())
    assert raised.value.message.endswith(f"; did you mean {checkout.path}?")


TASK = "tasks/finalpool/find-paper"
DEEP = {
    ".py": f"all_token_key_session = Dict(x={'a' + '.b' * 2000})\ndef evaluate():\n return {'-' * 2000}1",
    ".json": f'{{"needed_mcp_servers": [], "x": {"[" * 100_000}',
    ".yaml": "a0: &a0 {k: v}\n"
    + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)),
    ".md": "x",
}


@pytest.mark.parametrize("kind", ["fifo", "long", "deep", "number"])
@pytest.mark.parametrize(
    "file",
    [
        *("suite.yaml", "configs/mcp_servers/x.yaml", "configs/token_key_session.py"),
        *(f"{TASK}/{name}" for name in ("task_config.json", "docs/task.md", "evaluation/rubric.yaml")),
        *(f"{TASK}/evaluation/evaluator.py", "tasks/finalpool/task_conflict.json"),
    ],
)
def test_no_file_of_a_checkout_keeps_its_reader_busy(checkout: Checkout, file: str, kind: str) -> None:
    checkout.task(servers=("x",))
    path = checkout.write(file)
    if kind == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif kind == "number":
        path.write_text("x: 1" + ":1" * 400_000)
    elif kind == "deep":
        path.write_text(DEEP[path.suffix])
    else:
        os.truncate(path, 64 << 20)
    tracemalloc.start()
    try:
        with suppress(SuiteError):
            suite = checkout.load()
            task = suite.tasks["find-paper"]
            assert suite.resources.token_values_for(task) is not None
            load_rubric(suite, task)
            suite.task("find-paper")
            read_text(checkout.path / TASK / "docs/task.md")
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used < 64 << 20


@pytest.mark.parametrize("name", ["task_config.json", "docs", "docs/task.md"])
def test_a_link_out_of_the_checkout_is_not_read(checkout: Checkout, tmp_path: Path, name: str) -> None:
    folder = checkout.task()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(SuiteError, match="leads out of the checkout"):
        checkout.load().task("find-paper")


def test_folders_that_are_too_deep_are_an_error(checkout: Checkout) -> None:
    (checkout.task() / "/".join("d" * 300)).mkdir(parents=True)
    with pytest.raises(SuiteError, match="below each other"):
        _ = checkout.load().revision
