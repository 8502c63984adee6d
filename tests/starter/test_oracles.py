"""What the package says of its suite: where it lies, which tasks it has, and how each is solved."""

from __future__ import annotations

import json

import pytest
from decathlon_client.script import Step
from decathlon_client.values import CLAIM

from decathlon_mcp.errors import UnknownTaskError
from decathlon_mcp.starter import oracle, oracle_ids, suite_path

TASKS = suite_path() / "tasks" / "starter"


def test_every_task_has_an_oracle_and_every_oracle_a_task() -> None:
    assert oracle_ids() == sorted(path.name for path in TASKS.iterdir())


def test_no_oracle_lies_in_the_checkout() -> None:
    assert not list(suite_path().rglob("*.jsonl"))


@pytest.mark.parametrize("task", oracle_ids())
def test_an_oracle_uses_the_tools_of_its_task_alone_and_claims_last(task: str) -> None:
    needed = json.loads((TASKS / task / "task_config.json").read_text())["needed_mcp_servers"]
    *calls, claim = oracle(task)
    assert {step.tool.split("__")[0] for step in calls} <= set(needed)
    assert claim.tool == CLAIM
    assert claim.arguments["answer"]


@pytest.mark.parametrize("task", oracle_ids())
def test_a_task_says_where_it_works_and_how_it_ends(task: str) -> None:
    prompt = (TASKS / task / "docs" / "agent_system_prompt.md").read_text()
    assert "!!<<<<||||workspace_dir||||>>>>!!" in prompt
    assert "`local-claim_done`" in prompt
    assert (TASKS / task / "docs" / "task.md").read_text().strip()


def test_an_unknown_task_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(UnknownTaskError) as caught:
        oracle("../suite/tasks/starter/explain-outage")
    assert caught.value.data["near"] == oracle_ids()


def test_the_workspace_is_filled_in_at_any_depth() -> None:
    step = Step("a__b", {"path": "{workspace}/x", "rows": [["{workspace}"], {"k": "{workspace}"}], "n": 1})
    assert step.resolve("/w") == {"path": "/w/x", "rows": [["/w"], {"k": "/w"}], "n": 1}
