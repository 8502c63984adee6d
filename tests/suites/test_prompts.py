"""Prompts: placeholders, tool names in the configured spelling, the sentence on how an attempt ends."""

from __future__ import annotations

from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.prompts import Prompt

if TYPE_CHECKING:
    from decathlon_mcp.types import Language, Names
    from tests.suites.conftest import Checkout

FRIDAY = datetime(2026, 1, 2, 3, 4, 5)

UPSTREAM = """\
Accessible workspace directory: !!<<<<||||workspace_dir||||>>>>!!
Root: !!<<<<||||current_working_dir||||>>>>!!, relative: !!<<<<||||workspace_dir_rela||||>>>>!!
Now: !!<<<<||||time||||>>>>!!
If you believe the task is completed, you can either call the `local-claim_done` tool or respond without \
calling any tool to indicate completion. This will immediately terminate the task, and you will have no \
further opportunity to work on it."""

INDEPENDENCE = (
    "Please complete the given task independently. Do not seek confirmation or additional feedback from "
    "the user. You should handle all situations on your own, as the user will not provide any further "
    "information."
)


def prompt(
    checkout: Checkout,
    names: Names = "decathlon",
    *,
    system: str | None = UPSTREAM,
    task: str = "Find the paper.",
    language: Language = "en",
    root: str = "/workspace",
) -> Prompt:
    checkout.server("files")
    checkout.task(servers=("files",))
    checkout.write("tasks/finalpool/find-paper/docs/task.md", task)
    if system is not None:
        checkout.write("tasks/finalpool/find-paper/docs/agent_system_prompt.md", system)
    suite = checkout.load(language)
    return suite.prompt(
        suite.tasks["find-paper"],
        root=PurePosixPath(root),
        launch_time=FRIDAY,
        names=names,
    )


def test_the_system_prompt_is_upstreams_except_for_the_claim_sentence(checkout: Checkout) -> None:
    assert prompt(checkout).system == (
        "Accessible workspace directory: /workspace/dumps/workspace\n"
        "Root: /workspace, relative: dumps/workspace\n"
        "Now: 2026-01-02 03:04:05 Friday\n"
        "Nothing but the `claim_done` tool ends your attempt: call it when you believe that the task is "
        "completed, with your final message (the answer, if the task asks for one) in `answer`. "
        "This will immediately terminate the task, and you will have no further opportunity to work on it.\n"
        f"{INDEPENDENCE}"
    )


@pytest.mark.parametrize(
    ("names", "spelled"),
    [
        ("decathlon", "local__python-execute, `files__read_file`, `files__read`, `claim_done`"),
        ("toolathlon", "local-python-execute, `files-read_file`, `files-read`, `local-claim_done`"),
        ("raw", "python-execute, `read_file`, `read`, `claim_done`"),
    ],
)
def test_tool_names_in_a_prompt_follow_the_configured_spelling(
    checkout: Checkout, names: Names, spelled: str
) -> None:
    text = "Use local-python-execute, `files-read_file`, `files__read`, `local-claim_done`"
    assert prompt(checkout, names, task=text).task == f"Use {spelled}"


def test_verified_names_rewrite_local_tools_in_the_system_prompt_and_leave_the_task(
    checkout: Checkout,
) -> None:
    text = (
        "Use local-python-execute, `local-claim-done`, local-search_history, `files-read_file`, "
        "`files__read`, `claim_done`, non-local-sleep, local-sleep-2, local-sleep."
    )
    verified = prompt(checkout, "verified", system=f"{text}\n{UPSTREAM}", task=text)
    assert verified.task == text
    first, *_, claim, independence = (verified.system or "").splitlines()
    assert first == (
        "Use local_python_execute, `local_claim_done`, local_search_history, `files-read_file`, "
        "`files__read`, `claim_done`, non-local-sleep, local-sleep-2, local_sleep."
    )
    assert claim.startswith("Nothing but the `local_claim_done` tool ends your attempt")
    assert independence == INDEPENDENCE


@pytest.mark.parametrize(
    "text",
    [
        "a local-first shop, see non-local-claim_done and local-claim_done-2",
        "`files-report` and files-read_file.txt, `other-read_file`",
    ],
)
def test_text_that_may_not_be_a_tool_name_is_unchanged(checkout: Checkout, text: str) -> None:
    assert prompt(checkout, task=text).task == text


def test_a_language_has_its_own_prompt_files(checkout: Checkout) -> None:
    folder = "tasks/finalpool/find-paper/docs"
    checkout.write(f"{folder}/task_cn.md", "找论文。")
    upstream = "工作区：!!<<<<||||workspace_dir||||>>>>!!\n"
    upstream += "若你认为任务已完成，可以调用local-claim-done工具，来表明自己已经完成了给定的任务"
    checkout.write(f"{folder}/agent_system_prompt_cn.md", upstream)
    chinese = prompt(checkout, language="cn")
    assert chinese.task == "找论文。"
    workspace, claim, independence = (chinese.system or "").splitlines()
    assert workspace == "工作区：/workspace/dumps/workspace"
    assert claim.startswith("只有调用`claim_done`工具才会结束本次任务")
    assert independence == INDEPENDENCE


def test_a_prompt_in_a_language_without_text_is_an_error(checkout: Checkout) -> None:
    with pytest.raises(SuiteError, match=r"task_cn\.md"):
        prompt(checkout, language="cn")
